"""Ports of servers in tests: several processes choose ports at once, before any server listens."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from kvtier_testing.tiers._servers import free_port

HOLD = "from kvtier_testing.tiers._servers import free_port; print(free_port(), flush=True); input()"


def test_processes_choose_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    held = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=held, stdout=held, text=True) as other:
        assert other.stdout is not None
        taken = int(other.stdout.readline())
        drawn = iter([taken, *range(17_000, 18_000)])
        monkeypatch.setattr("random.SystemRandom.choice", lambda *_: next(drawn))
        assert 17_000 <= free_port() < 18_000
        other.communicate("\n")
    assert other.returncode == 0


def test_port_is_free() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
