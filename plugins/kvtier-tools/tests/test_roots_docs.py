"""The page on the file tier has every key of the tools' JSON and no other."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from kvtier._identity import Difference
from kvtier_tools.root import compare, du, gc, ls, stat, verify

PAGE = Path(__file__).parents[3] / "docs" / "tiers" / "fs.md"

DOCUMENTS: dict[str, Any] = {
    "`ls`": ls.RootListing,
    "of `ls`, a namespace": ls.CacheListing,
    "`compare`": compare.Comparison,
    "of `compare`, a setting": Difference,
    "`stat`": stat.ChunkReport,
    "`du`": du.DiskUsage,
    "of `du`, a part": du.UsagePart,
    "`verify`": verify.RootVerification,
    "of `verify`, a namespace": verify.CacheVerification,
    "of `verify`, an ill file": verify.DamagedFile,
    "`gc`": gc.CollectionResult,
}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_document_keys_are_told(document: str) -> None:
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {document} | `")]
    told = re.findall(r"`([a-z_]+)`", row.split("|")[2])
    assert told == [field.name for field in dataclasses.fields(DOCUMENTS[document])]
