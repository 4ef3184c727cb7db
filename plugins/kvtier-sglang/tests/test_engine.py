"""Run a real engine twice; the second one finds the first one's pages. Needs a GPU and SGLang's kernels."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import settings

RUN_S = 280
MODEL = os.environ.get("KVTIER_SGLANG_MODEL", "")
SCRIPT = """
import json, sys, time
from pathlib import Path
import sglang

if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    engine = sglang.Engine(**given["engine"])
    answer = engine.generate("The quick brown fox. " * 400, {"temperature": 0, "max_new_tokens": 16})
    end_s = time.monotonic() + 120
    while len(list(Path(given["root"]).rglob("*.bin"))) < 10 and time.monotonic() < end_s:
        time.sleep(0.1)
    engine.shutdown()
    print(json.dumps([answer["text"], answer["meta_info"]["cached_tokens"]]))
"""


def run(command: list[str], folder: Path) -> str:
    """Return the output of a program.

    Kill its whole session at the end, because engines have child processes.
    """
    out, err = folder / "out", folder / "err"
    with out.open("w") as stdout, err.open("w") as stderr:
        engine = subprocess.Popen(command, stdout=stdout, stderr=stderr, start_new_session=True)
        try:
            engine.wait(RUN_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(engine.pid, signal.SIGKILL)
            engine.wait()
    assert engine.returncode == 0, err.read_text()[-4000:]
    return out.read_text()


@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not (MODEL and torch.cuda.is_available() and find_spec("sgl_kernel")),
    reason="needs a GPU, sgl_kernel, and a model that KVTIER_SGLANG_MODEL names",
)
def test_second_engine_reuses_pages(tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(SCRIPT)
    root = tmp_path / "root"
    extra = settings(root, cpu_bytes_to_use="1GiB", isolation="auto", request_deadline_s=5.0)
    extra["kvtier"]["secondary_tiers"][0]["max_bytes"] = "8GiB"  # type: ignore[index]
    engine = {
        "model_path": MODEL, "page_size": 64, "enable_hierarchical_cache": True,
        "hicache_mem_layout": "page_first", "hicache_write_policy": "write_through",
        "hicache_storage_prefetch_policy": "wait_complete", "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(extra),
        "enable_deterministic_inference": True,
    }  # fmt: skip
    command = [sys.executable, str(script), json.dumps({"engine": engine, "root": str(root)})]
    answers = []
    for _ in range(2):
        answers.append(json.loads(run(command, tmp_path).splitlines()[-1]))
    (first, cached), (second, cached_later) = answers
    assert first == second
    assert cached == 0 < cached_later
