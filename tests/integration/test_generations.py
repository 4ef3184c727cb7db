"""Versions of vLLM with one KV format read each other's chunks, and give the same answer to every prompt.

The other versions come from the environment: ``KVTIER_VLLMS`` is a JSON list of objects with ``python``, the
interpreter of an environment that has vLLM and kvtier, and ``environment``, variables for it such as
``PYTHONPATH``. ``nox -s generations`` makes the environments and sets it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvtier._identity import differences
from tests.integration.conftest import ENVIRONMENT
from tests.integration.harness import PROMPT_CHUNKS, Launcher, Tokens, prompt

PROMPTS = 2
CHUNKS = PROMPTS * PROMPT_CHUNKS
VLLMS: list[dict[str, Any]] = json.loads(os.environ.get("KVTIER_VLLMS", "[]"))

pytestmark = pytest.mark.skipif(
    len(VLLMS) < 2, reason="KVTIER_VLLMS names no two versions; nox -s generations sets it"
)


@pytest.fixture(scope="module")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Launcher]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Launcher(
                    tmp_path_factory.mktemp("engines"),
                    {**ENVIRONMENT, **one.get("environment", {})},
                    python=one["python"],
                )
            )
            for one in VLLMS
        ]


@pytest.mark.timeout(1800)
def test_versions_read_each_other(
    launchers: list[Launcher], make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """Let each version write its own prompts to one root and read all of them, including after a restart."""
    model = make_llama()
    root = tmp_path / "root"
    settings = {
        "cpu_bytes_to_use": "64MiB",
        "secondary_tiers": [{"type": "fs", "root_dir": str(root)}],
    }
    prompts = [[prompt(10 * number + one) for one in range(PROMPTS)] for number in range(len(launchers))]
    expected: list[list[Tokens]] = []
    for writer, (launcher, its) in enumerate(zip(launchers, prompts, strict=True)):
        with launcher.start(model, enable_prefix_caching=False) as engine:
            expected.append(engine.generate(*its))
        with launcher.start(model, settings) as engine:
            answers, loaded = engine.served(*its)
        assert (answers, loaded) == (expected[writer], {}), VLLMS[writer]

    first, *others = (json.loads(path.read_text()) for path in root.glob("*/config.json"))
    assert [differences(first, other) for other in others] == []
    for reader, writer in product(range(len(launchers)), repeat=2):
        with launchers[reader].start(model, settings) as engine:
            answers, loaded = engine.served(*prompts[writer])
        assert loaded == {"fs": CHUNKS}, (VLLMS[reader], VLLMS[writer])
        assert answers == expected[writer], (VLLMS[reader], VLLMS[writer])
