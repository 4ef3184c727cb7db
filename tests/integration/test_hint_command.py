"""``kvtier hint`` against a real server: each action on each target, and its outcome."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtier_bench.engine.server import ANSWER_S, Server, add_tokenizer
from kvtier_testing.tiers._servers import free_port
from tests.integration.conftest import ENVIRONMENT
from tests.integration.harness import PROMPT_CHUNKS, SIZES, patient, prompt
from tests.integration.router import Router

pytestmark = pytest.mark.timeout(900)

UNTIL_S = 60.0
CONNECTOR = {
    "kv_connector": "KVTierConnector",
    "kv_connector_module_path": "kvtier.adapters.vllm.connector",
    "kv_load_failure_policy": "recompute",
}


@dataclass(frozen=True)
class Site:
    """A server, and a router that follows its KV events."""

    server: Server
    router: Router
    folder: Path

    def hint(self, *arguments: str, text: str = "", blocks: list[int] | None = None) -> tuple[int, str]:
        """Run the command; return its status, and the first word and the reason of its output."""
        command = [sys.executable, "-m", "kvtier", "hint", self.server.url, *arguments, "--json"]
        if text:
            command += ["--prompt", "-"]
        if blocks is not None:
            named = self.folder / "blocks.json"
            named.write_text(json.dumps(blocks))
            command += ["--blocks", str(named)]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=ANSWER_S)
        assert done.stdout, done.stderr
        told = json.loads(done.stdout)
        assert told["action"] == arguments[0]
        return done.returncode, f"{told['outcome']} {told['reason']}"

    def blocks(self) -> list[int]:
        """Return the blocks of the one stored prompt, as KV events name them."""
        deadline, stored = time.monotonic() + UNTIL_S, list[dict[str, Any]]()
        while len(stored) < PROMPT_CHUNKS:
            assert time.monotonic() < deadline, self.router.events
            self.router.take_in()
            stored = [event for event in self.router.events if event["medium"] == "CPU"]
        return [event["block_hashes"][-1] for event in stored]


@pytest.fixture(scope="module")
def site(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("hint")
    model = folder / "tiny"
    shutil.copytree(llama, model)
    add_tokenizer(model)
    router = Router(f"ipc://{folder}/events")
    tiers = [{"type": "fs", "root_dir": str(folder / "root"), "max_bytes": "1GiB"}]
    settings = patient({"cpu_bytes_to_use": "32MiB", "secondary_tiers": tiers})
    server = Server(
        model,
        {"spec_name": "KVTierOffloadingSpec", **settings},
        folder / "server.log",
        free_port(),
        ENVIRONMENT,
        kv_transfer_config=CONNECTOR,
        kv_events_config={"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": router.endpoint},
        **SIZES,
    )
    with server:
        yield Site(server, router, folder)
    router.close()


def test_each_action_has_its_outcome(site: Site) -> None:
    text, other = (" ".join(f"w{token}" for token in prompt(seed)) for seed in (1, 2))
    assert site.hint("prefetch", text=text) == (0, "accepted ok")
    blocks = site.blocks()
    assert site.hint("pin", "--session", "s", "--ttl", "5m", text=text) == (0, "accepted new")
    assert site.hint("pin", "--session", "s", "--ttl", "5m", text=other) == (0, "accepted ok")
    assert site.hint("retain", "--priority", "2", text=text) == (0, "accepted ok")
    assert site.hint("demote", "--session", "s") == (0, "accepted ok")
    assert site.hint("prefetch", "--session", "s", "--tier", "fs") == (0, "accepted ok")
    assert site.hint("release", "--session", "s") == (0, "accepted ok")
    assert site.hint("release", "--session", "t") == (1, "missing session")
    assert site.hint("release", text=other) == (0, "accepted ok")
    assert site.hint("demote", text=other) == (0, "accepted ok")

    for action in ("pin", "prefetch", "retain", "release", "demote"):
        assert site.hint(action, blocks=blocks) == (0, "accepted ok")
        assert site.hint(action, blocks=[7]) == (1, "missing blocks")
    assert site.hint("pin", blocks=[*blocks, *range(8192)]) == (0, "clipped limit")
    assert site.hint("pin", "--session", "s", blocks=blocks) == (0, "accepted new")

    assert site.hint("fetch", "--source", "10.0.0.1:1", text=text, blocks=blocks) == (1, "rejected peer")
    assert site.hint("prefetch", "--tier", "s3", text=text) == (1, "rejected target")
    assert site.hint("pin", "--ttl", "2d", text=text) == (1, "rejected malformed")
