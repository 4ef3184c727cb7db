"""NUMA: the node that memory is allocated on when it is first touched. Linux only; elsewhere nothing happens.

A page is allocated on the node that the touching thread prefers; for a file in shared memory at the first
touch of any process: ``set_mempolicy(2)``, ``tmpfs(5)``.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier._log import GuardedLogger

logger = GuardedLogger("kvtier.memory")

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_DEFAULT, _PREFERRED = 0, 1
_MAX_NODES = 1024
_NODES = Path("/sys/devices/system/node")
_PCI_DEVICES = Path("/sys/bus/pci/devices")


def online(nodes: Path = _NODES) -> frozenset[int]:
    """Return the nodes of this machine; empty if the kernel lists none."""
    return frozenset(
        int(found[1]) for path in nodes.glob("node*") if (found := re.fullmatch(r"node(\d+)", path.name))
    )


def node_of_cpus(cpus: Iterable[int], nodes: Path = _NODES) -> int | None:
    """Return the node of all these CPUs; None if there is not exactly one."""
    found = {node for cpu in cpus for node in online(nodes) if (nodes / f"node{node}" / f"cpu{cpu}").exists()}
    return found.pop() if len(found) == 1 else None


def node_of_pci(address: str, devices: Path = _PCI_DEVICES) -> int | None:
    """Return the node of a PCI device, given its address such as ``0000:3b:00.0``."""
    try:
        node = int((devices / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


@contextmanager
def preferring(node: int | None) -> Iterator[None]:
    """Allocate pages that this thread touches first on ``node``; with None the system decides."""
    if node is None or not _set_policy(_PREFERRED, node):
        yield
        return
    try:
        yield
    finally:
        _set_policy(_DEFAULT)


def _set_policy(mode: int, node: int | None = None) -> bool:
    call = _SET_MEMPOLICY.get(platform.machine())
    if call is None:
        return False
    mask = (ctypes.c_uint8 * (_MAX_NODES // 8))()
    if node is not None:
        mask[node // 8] = 1 << node % 8
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        ctypes.c_long(call),
        ctypes.c_long(mode),
        None if node is None else ctypes.byref(mask),
        ctypes.c_ulong(0 if node is None else _MAX_NODES),
    )
    if failed:
        logger.debug("memory of NUMA node %s cannot be requested: %s", node, os.strerror(ctypes.get_errno()))
    return not failed
