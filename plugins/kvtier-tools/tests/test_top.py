"""``kvtier top``: its display of an engine's metrics."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier._telemetry import catalogue
from kvtier_tools.top import Snapshot, parse, view_of
from tests.caches import Kvtier
from tests.common import PATIENCE_S

PAGE = """\
# HELP kvtier_loaded_chunks_total Hits.
# TYPE kvtier_loaded_chunks_total counter
kvtier_loaded_chunks_total{{engine="0",model_name="m",tier="cpu"}} {cpu}
kvtier_loaded_chunks_total{{engine="0",model_name="m",tier="disk"}} {disk}
kvtier_misses_total{{engine="0",model_name="m",reason="absent"}} {absent}
kvtier_misses_total{{engine="0",model_name="m",reason="deadline"}} 1.0
kvtier_tier_up{{tier="disk"}} 1.0
kvtier_tier_used_bytes{{tier="cpu"}} 1024.0
kvtier_tier_used_bytes{{tier="disk"}} 2048.0
kvtier_tier_capacity_bytes{{tier="cpu"}} 4096.0
kvtier_breaker_state{{tier="disk",verb="get"}} 2.0
kvtier_breaker_state{{tier="disk",verb="put"}} 0.0
kvtier_queued_transfers{{tier="disk",verb="get"}} 3.0
kvtier_queued_transfers{{tier="disk",verb="put"}} 4.0
vllm:kv_offload_tiering_read_bytes_total{{tier="disk"}} {read}
vllm:kv_offload_tiering_write_bytes_total{{tier="disk"}} 1e+06
vllm:num_requests_running{{engine="0"}} 1.0
"""
FIRST = PAGE.format(cpu=10, disk=20, absent=69, read=500_000)
SECOND = PAGE.format(cpu=40, disk=30, absent=79, read=2_500_000)


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Serve pages one after the other, the last one again and again. Returns host:port."""
    servers = []

    def start(*pages: str) -> str:
        left = list(pages)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                assert self.path == "/metrics"
                self.send_response(200)
                self.end_headers()
                self.wfile.write((left.pop(0) if len(left) > 1 else left[0]).encode())

            def log_message(self, *_: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_two_samples_give_rates(kvtier: Kvtier, serve: Any) -> None:
    said = kvtier("top", serve(FIRST, SECOND), "--once", "--interval", 0.1, "--json")
    (view,) = said.json["engines"]
    assert said.status == 0
    assert (view["chunks"], view["misses"]) == (50, {"absent": 10})
    assert view["hit_share"] == 0.8
    cpu, disk = view["tiers"]
    assert (cpu["tier"], cpu["hit_share"], cpu["used_bytes"], cpu["capacity_bytes"]) == (
        "cpu",
        0.6,
        1024,
        4096,
    )
    assert (disk["tier"], disk["hit_share"], disk["is_up"], disk["queued"]) == ("disk", 0.2, True, 7)
    assert (disk["breaker_get"], disk["breaker_put"]) == ("open", "closed")
    assert disk["read_bytes_s"] == pytest.approx(2_000_000 / view["seconds"])
    assert (disk["written_bytes_s"], disk["read_per_written"]) == (0.0, 2.5)


def test_saved_page_gives_sums(kvtier: Kvtier, tmp_path: Path) -> None:
    page = tmp_path / "page"
    page.write_text(FIRST)
    with page.open("a") as file:
        file.write('kvtier_tier_up{tier="fs"} 1\n')
    said = kvtier("top", page)
    assert said.status == 0
    assert "100 chunks looked up since it started, 30.0 % hits" in said.out
    assert "misses: absent 69, deadline 1" in said.out
    header, row = (
        next(line for line in said.out.splitlines() if word in line) for word in ("get breaker", "disk")
    )
    cells = dict(zip(*([cell.strip() for cell in re.split("[│┃]", it)] for it in (header, row)), strict=True))
    assert (cells["get breaker"], cells["put breaker"], cells["read / written"]) == ("open", "closed", "0.50")
    assert (cells["up"], cells["used"], cells["hits"], cells["queued"]) == ("yes", "2.0 KiB", "20.0 %", "7")


def test_restarted_engine_counts_from_zero() -> None:
    before, now = Snapshot(0.0, parse(SECOND)), Snapshot(1.0, parse(FIRST))
    view = view_of("engine", now, before)
    assert view.chunks == 10 + 20 + 69
    assert all(tier.read_bytes_s is None or tier.read_bytes_s >= 0 for tier in view.tiers)


def test_silent_engine_among_several(kvtier: Kvtier, serve: Any) -> None:
    answers = serve(FIRST)
    said = kvtier(
        "top", answers, "127.0.0.1:9", serve("up 1\n"), "file:///etc/passwd", "--once", "--interval", 0.1
    )
    assert said.status == 1
    assert f"{answers}: 0 chunks looked up in " in said.out
    assert "127.0.0.1:9: cannot be read: " in said.out
    assert "has no metrics of kvtier: configure KVTierOffloadingSpec in vLLM, or register" in said.out
    assert "file:///etc/passwd: cannot be read: neither a file nor a URL" in said.out


def test_engines_are_asked_at_once(kvtier: Kvtier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_tools.top._TIMEOUT_S", 2 * PATIENCE_S)
    other_is_asked = threading.Event()

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert other_is_asked.wait(PATIENCE_S)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(FIRST.encode())

        def log_message(self, *_: object) -> None:
            pass

    class Other(Slow):
        def do_GET(self) -> None:
            other_is_asked.set()
            super().do_GET()

    addresses = []
    with ExitStack() as stack:
        for handler in (Slow, Other):
            server = stack.enter_context(HTTPServer(("127.0.0.1", 0), handler))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            addresses.append(f"127.0.0.1:{server.server_port}")
        said = kvtier("top", *addresses, "--once", "--interval", 0.1)
    assert (said.status, "cannot be read" in said.out) == (0, False)


def test_silent_engine_allows_interrupt() -> None:
    code = (
        "import signal; from kvtier_tools import top; from kvtier.__main__ import main; "
        "top._TIMEOUT_S = 600; "
        # Whoever runs the tests in the background may have it ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler); main()"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", code, "top", f"127.0.0.1:{server.getsockname()[1]}"]
        with subprocess.Popen(command) as process, server.accept()[0] as connection:
            try:
                assert connection.recv(1), "it waits for the answer"
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 130
            finally:
                process.kill()


def test_ranks_join_per_metric() -> None:
    page = "".join(
        f'kvtier_breaker_state{{engine="{rank}",tier="fs",verb="get"}} 2\n'
        f'kvtier_tier_up{{engine="{rank}",tier="fs"}} {rank}\n'
        f'kvtier_tier_used_bytes{{engine="{rank}",tier="fs"}} 1000\n'
        f'kvtier_tier_used_bytes{{engine="{rank}",tier="cpu"}} {10 + rank}\n'
        for rank in (0, 1)
    )
    cpu, fs = view_of("engine", Snapshot(0.0, parse(page + 'kvtier_tier_up{tier="x"} NaN\n'))).tiers
    assert (fs.breaker_get, fs.is_up, fs.used_bytes, cpu.used_bytes) == ("open", False, 1000, 21)


def test_unreadable_ends_with_status_1(kvtier: Kvtier, tmp_path: Path) -> None:
    def greet(server: socket.socket) -> None:
        with server.accept()[0] as connection:
            connection.send(b"SSH-2.0-x\r\n")

    with socket.create_server(("127.0.0.1", 0)) as other:
        greeting = threading.Thread(target=greet, args=(other,))
        greeting.start()
        said = kvtier("top", f"127.0.0.1:{other.getsockname()[1]}", "localhost:99999", "--once")
        greeting.join()
    assert said.status == 1
    assert said.out.count("cannot be read: ") == 2
    said = kvtier("top", tmp_path / "missing")  # ends: a file is read once
    assert said.status == 1
    assert "missing: cannot be read: " in said.out


def test_slow_server_delays_no_other(kvtier: Kvtier, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("kvtier_tools.top._MAX_PAGE_BYTES", len(FIRST) - 1)
        said = kvtier("top", serve(FIRST), "--once")
    assert "cannot be read: the page has more than " in said.out
    monkeypatch.setattr("kvtier_tools.top._TIMEOUT_S", 0.2)
    said = asked_of(dribble, kvtier)
    assert re.search("cannot be read: (the page has not ended within 0.2 s|.*timed out)", said.out)


def test_cut_page_is_refused(kvtier: Kvtier) -> None:
    said = asked_of(lambda connection: connection.send(b"Content-Length: 100\r\n\r\nkvtier_x 12"), kvtier)
    assert "cannot be read: the page has ended 89 bytes early" in said.out


def dribble(connection: socket.socket) -> None:
    """Send a byte at a time, until the other side has enough."""
    with suppress(OSError):
        connection.send(b"\r\n")
        while True:
            connection.send(b"#")
            time.sleep(0.01)


def asked_of(answer: Callable[[socket.socket], object], kvtier: Any) -> Any:
    """Return what ``kvtier top`` says of a server that answers 200, and then as it is told."""

    def serve_one(server: socket.socket) -> None:
        with server.accept()[0] as connection:
            connection.recv(65536)
            connection.send(b"HTTP/1.1 200 OK\r\n")
            answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as server:
        serving = threading.Thread(target=serve_one, args=(server,))
        serving.start()
        said = kvtier("top", f"127.0.0.1:{server.getsockname()[1]}", "--once")
        serving.join()
    return said


@pytest.mark.parametrize("source", ["http://me:hidden@localhost:1/metrics", "me:hidden@localhost:1"])
def test_url_credentials_are_refused(kvtier: Kvtier, source: Any) -> None:
    said = kvtier("top", "--once", source)
    assert said.status != 0
    assert "credentials in a URL are not supported" in " ".join(
        (said.out + said.err).replace("│", " ").split()
    )
    assert "hidden" not in said.out + said.err


def test_missing_values_are_left_out(kvtier: Kvtier, tmp_path: Path) -> None:
    page = tmp_path / "page"
    names = (
        "kvtier_loaded_chunks_total",
        "kvtier_tier_used_bytes",
        "vllm:kv_offload_tiering_read_bytes_total",
    )
    page.write_text(
        "".join(f'{name}{{tier="cpu",engine="{rank}"}} 1e308\n' for name in names for rank in "01")
    )
    with page.open("a") as file:
        file.write('kvtier_tier_up{tier="fs"} 1\n')
    said = kvtier("top", page)
    assert said.status == 0
    assert "0 chunks looked up since it started" in said.out


def test_labels_are_escaped(kvtier: Kvtier, tmp_path: Path) -> None:
    page = tmp_path / "page"
    page.write_text(
        'kvtier_misses_total{reason="\x1b[31m\\"[red]\\\\"} 5\nkvtier_tier_up{tier="[bold]x"} 0\n'
    )
    said = kvtier("top", page)
    assert "\x1b" not in said.out
    assert '\\x1b[31m"[red]\\ 5' in said.out
    assert "[bold]x" in said.out


@given(text=st.text() | st.from_regex(r"\A(kvtier_misses_total\{[^\n]{0,40} [0-9naif+-]{0,5}\n?){0,5}\Z"))
def test_any_page_is_read(text: Any) -> None:
    for name, labels, value in parse(text):
        assert (type(name), type(labels), type(value)) == (str, dict, float)


def test_read_metrics_exist() -> None:
    from kvtier_tools import top

    published = {
        f"{metric.name}_total" for metric in (*catalogue.COUNTERS.values(), *catalogue.BYTES.values())
    }
    published |= set(catalogue.GAUGES)
    assert {top.LOADED, top.MISSES, top.READ, top.WRITTEN, *top.GAUGES} <= published
