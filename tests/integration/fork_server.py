"""A process that has imported the engine and forks a new one on request.

Importing vLLM takes ten seconds or more, starting an engine two or three. Forked children share only the
import: each has its own environment, metrics and log, and can be killed. The parent starts no engine, so
children inherit no engine state.

Run as ``python -m tests.integration.fork_server``; standard input is a socket. A request comes with two file
descriptors, the child's own socket and its log; the answer is the child's process id.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import traceback

from kvtier_bench.engine.process import Engine, die_with_parent, serve

STACKS = signal.SIGUSR2
"""Makes a child write its threads' stacks to its log."""

_MAX_REQUEST_BYTES = 1 << 16


def main() -> None:
    """Fork a child for each request until the other end hangs up."""
    die_with_parent()
    Engine().load({})
    gc.freeze()  # vLLM collects garbage four times per engine; the imports alone cost two seconds
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    requests = socket.socket(fileno=os.dup(0))
    requests.sendall(b"ready\n")
    while True:
        request, fds, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 2)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            requests.close()
            _run_child(json.loads(request), *fds)
        for fd in fds:
            os.close(fd)
        requests.sendall(f"{pid}\n".encode())


def _run_child(environment: dict[str, str], channel_fd: int, log_fd: int) -> None:
    status = 1
    try:
        os.setsid()
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        faulthandler.enable()
        faulthandler.register(STACKS)
        os.environ.update(environment)
        serve(socket.socket(fileno=channel_fd), Engine())
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # skip the exit handlers of the parent's imports


if __name__ == "__main__":
    main()
