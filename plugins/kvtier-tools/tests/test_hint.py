"""``kvtier hint``: what it sends to a server, and what it prints of the answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.caches import Kvtier


class Server(ThreadingHTTPServer):
    """A server that keeps what it is sent, and answers with an outcome."""

    sent: dict[str, Any]
    told: Any = ("accepted", "ok")
    status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    """Answers as vLLM does."""

    server: Server

    def log_message(self, *_args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._reply({"data": [{"id": "llama"}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        self.server.sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        told = self.server.told
        if isinstance(told, tuple):
            outcome = {"action_id": "kvtier hint", "outcome": told[0], "reason": told[1]}
            told = {"kv_transfer_params": {"kvtier": {"outcomes": [outcome]}}}
        self._reply(told)

    def _reply(self, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as it:
        thread = threading.Thread(target=it.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield it
        it.shutdown()
        thread.join()


def test_pin_of_a_prompt(kvtier: Kvtier, server: Server, tmp_path: Path) -> None:
    prompt = tmp_path / "system.txt"
    prompt.write_text("You help.")
    said = kvtier("hint", server.url, "pin", "--prompt", str(prompt), "--session", "s", "--ttl", "5m")
    assert (said.status, said.out) == (0, "pin: accepted (ok)\n")
    assert (server.sent["model"], server.sent["prompt"], server.sent["max_tokens"]) == (
        "llama",
        "You help.",
        1,
    )
    (action,) = server.sent["kv_transfer_params"]["kvtier"]["hints"]["actions"]
    assert (action["action_type"], action["action_version"]) == ("kv.pin", "0.1")
    assert action["payload"] == {"session": "s", "ttl_s": 300.0}


def test_fetch_of_blocks(kvtier: Kvtier, server: Server, tmp_path: Path) -> None:
    blocks = tmp_path / "blocks.json"
    blocks.write_text(f"[{2**64 - 1}]")
    server.told = ("missing", "blocks")
    where = ["--blocks", str(blocks), "--source", "10.0.0.1:18570"]
    said = kvtier("hint", server.url, "fetch", *where, "--json")
    assert (said.status, said.json) == (1, {"action": "fetch", "outcome": "missing", "reason": "blocks"})
    (action,) = server.sent["kv_transfer_params"]["kvtier"]["hints"]["actions"]
    assert action["action_version"] == "1.0"
    assert action["payload"] == {"source_control_endpoint": "10.0.0.1:18570", "block_hashes": [2**64 - 1]}


@pytest.mark.parametrize("told", [{}, {"kv_transfer_params": None}])
def test_silent_server_is_named(kvtier: Kvtier, server: Server, told: Any) -> None:
    server.told = told
    said = kvtier("hint", server.url, "release", "--session", "s")
    assert said.status == 1
    assert "KVTierConnector" in said.out


def test_absent_server_is_named(kvtier: Kvtier) -> None:
    said = kvtier("hint", "http://127.0.0.1:9", "release", "--session", "s")
    assert (said.status, said.err) == (2, "kvtier: http://127.0.0.1:9: [Errno 111] Connection refused\n")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost:8000", "file:///etc/passwd"])
def test_other_address_is_refused(kvtier: Kvtier, url: str) -> None:
    said = kvtier("hint", url, "release", "--session", "s")
    assert said.status == 2
    assert f"{url}: not an http:// or https:// address" in said.err


def test_refusal_of_a_server_is_shown(kvtier: Kvtier, server: Server) -> None:
    server.told = {"error": {"message": "The model `m` does not exist."}}
    server.status = 404
    said = kvtier("hint", server.url, "release", "--session", "s", "--model", "m")
    assert said.status == 2
    assert "HTTP Error 404: Not Found: b'{" in said.err
    assert "The model `m` does not exist." in said.err


@pytest.mark.parametrize("told", [[], {"kv_transfer_params": 7}])
def test_other_server_is_an_error(kvtier: Kvtier, server: Server, told: Any) -> None:
    server.told = told
    said = kvtier("hint", server.url, "release", "--session", "s")
    assert said.status == 2
    assert "OpenAI-compatible" in said.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pin"], "--prompt, --session or --blocks"),
        (["teleport", "--session", "s"], "teleport"),
        (["pin", "--session", "s", "--ttl", "5"], "5"),
    ],
)
def test_wrong_use_is_explained(kvtier: Kvtier, server: Server, arguments: list[str], words: str) -> None:
    said = kvtier("hint", server.url, *arguments)
    assert said.status == 2
    assert words in said.err
