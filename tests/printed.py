"""Run the shell blocks of pages as printed: ``python tests/printed.py README.md docs/get-started.md``.

The interpreter's environment needs nothing but pip: the pages install kvtier into it. All of kvtier is real.
``vllm``, ``curl`` and ``nox`` are stand-ins. ``vllm`` checks the settings and puts one chunk into each tier.
``curl`` prints an engine's metrics. The session ``demo`` of nox runs what ``nox`` stands for.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

_ROOT = Path("/var/cache/kvtier")  # of the pages
_BLOCK = re.compile(r"^```(bash|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_STAND_INS = {
    "vllm": """
import asyncio, json, os, sys
from kvtier import HeapMemory, Identity, TieringConfig, pack_key
from kvtier._build import make_tiers
from kvtier.tiers import Batch, Status, TierContext
from kvtier.tiers._seal import seal

async def put_a_chunk(tier, memory, identity):
    await tier.tier.open(TierContext(tier.name, identity, memory.chunk_bytes))
    batch = Batch([pack_key(b"p" * 32)], [0], memory)
    batch.trailers[0] = seal(batch.keys[0], batch.views[0], identity.short_digest)
    assert list((await tier.tier.put(batch)).statuses) == [Status.OK]
    await tier.tier.aclose()

assert sys.argv[1] == "serve", sys.argv
connector = json.loads(sys.argv[sys.argv.index("--kv-transfer-config") + 1])
assert connector["kv_connector"] in ("KVTierConnector", "OffloadingConnector"), connector
settings = TieringConfig.from_extra_config(connector["kv_connector_extra_config"])
for tier in make_tiers(settings):
    asyncio.run(put_a_chunk(tier, HeapMemory(1, 2**20), Identity.make("printed", {})))
""",
    "curl": """
import sys
from kvtier._telemetry.catalogue import COUNTERS

assert sys.argv[-1] == "localhost:8000/metrics", sys.argv
for metric in COUNTERS.values():
    print(f"{metric.name}_total 1.0")
""",
    "nox": """
import sys

assert sys.argv[1:] == ["-s", "demo"], sys.argv
""",
}


def commands_of(page: Path) -> list[str]:
    """Return the commands of each shell block of a page: in a ``console`` block, the lines after ``$``."""
    blocks = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [
        text if kind == "bash" else "\n".join(re.findall(r"^\$ (.*)$", text, re.MULTILINE))
        for kind, text in blocks
    ]


def main() -> None:
    """Run the blocks of each page in turn. Raises CalledProcessError if one fails."""
    is_new = not _ROOT.exists()
    with tempfile.TemporaryDirectory() as stand_ins:
        for name, source in _STAND_INS.items():
            path = Path(stand_ins, name)
            path.write_text(f"#!{sys.executable}\n{source}")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        home = str(Path(sys.executable).parent)
        search = {"PATH": os.pathsep.join((stand_ins, home, os.environ["PATH"]))}
        try:
            for page in map(Path, sys.argv[1:]):
                for command in commands_of(page):
                    print(f"---- {page}\n{command}", flush=True)
                    shell = ["bash", "-euo", "pipefail", "-c", command]
                    subprocess.run(shell, check=True, env={**os.environ, **search})
        finally:
            if is_new:
                shutil.rmtree(_ROOT, ignore_errors=True)


if __name__ == "__main__":
    main()
