"""The README is short and says what its words mean; ``nox -s bare`` runs its commands as a user does."""

from __future__ import annotations

import re
from pathlib import Path

from kvtier import _schema as schema

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_sizes_are_called_sizes_and_what_they_are_is_said() -> None:
    rows = dict(re.findall(r"\| `(\w+)` \| ([^|]+) \|", "".join(schema.tables().values())))
    assert {rows[name] for name in rows if name.endswith("_bytes")} == {rows["cpu_bytes_to_use"]} == {"size"}
    assert "A *size* is a number of bytes" in schema.table()


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120
