"""``kvtier tiers`` and ``kvtier schema``: what is installed, and whether it loads."""

from __future__ import annotations

import subprocess
import sys

import importlib_metadata

from tests.caches import Cache, Kvtier
from tests.unit.conftest import InstallDistribution


def test_tiers_lists_what_loads(
    kvtier: Kvtier, acme: None, install_distribution: InstallDistribution
) -> None:
    install_distribution("acme-broken", "raise RuntimeError('[red]no luck[/red]')", {"broken": "Tier"}, "0.3")
    said = kvtier("tiers")
    assert said.status == 1
    rows = {}
    for line in said.out.splitlines():
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        rows[cells[0]] = cells[1:]
    assert rows["acme"] == ["acme-tiers", "1.2", "yes"]
    assert rows["fs"] == ["kvtier", importlib_metadata.version("kvtier"), "yes"]
    assert rows["broken"][:2] == ["acme-broken", "0.3"]
    assert rows["broken"][2].startswith("no: ")
    assert "RuntimeError: [red]no luck[/red]" in rows["broken"][2]
    assert rows["lru"][2] == rows["arc"][2] == "yes"


def test_tools_need_no_torch(cache: Cache) -> None:
    cache.put([0])
    code = f"""
import sys
sys.modules.update(torch=None, vllm=None, numpy=None)
from kvtier._cli import main
for words in (["tiers"], ["schema"], ["verify", {str(cache.root)!r}]):
    sys.argv = ["kvtier", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, words
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
