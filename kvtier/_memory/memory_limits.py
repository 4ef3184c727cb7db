"""Memory limits of this process: the machine's memory, and its control groups, such as a container.

The kernel kills a process that takes more. See ``cgroup-v2.rst`` and ``cgroup-v1/memory.rst`` in the kernel's
documentation, and ``proc_pid_mountinfo(5)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

_SPARE_SHARE, _SPARE_BYTES = 64, 2**30
_UNREADABLE: Final = (OSError, ValueError, LookupError)
_FILES: Final = {
    "cgroup2": ("memory.current", "", ("memory.max", "memory.high")),
    "cgroup": ("memory.usage_in_bytes", "total_", ("memory.limit_in_bytes",)),
}
"""By version: the file with the usage, the prefix of names in ``memory.stat``, and the files with limits."""


class MemoryLimit(NamedTuple):
    """A limit, its file, and the usage without the page cache, which the kernel reclaims."""

    limit_bytes: int
    path: Path
    used_bytes: int

    def __str__(self) -> str:
        return f"{self.path}: {self.used_bytes} of {self.limit_bytes} bytes are in use"


def exceeded_by(nbytes: int) -> MemoryLimit | None:
    """Return a limit that lacks room for ``nbytes`` more and a small reserve; None if all have room."""
    for limit in memory_limits():
        spare = min(limit.limit_bytes // _SPARE_SHARE, _SPARE_BYTES)
        if limit.used_bytes + nbytes + spare > limit.limit_bytes:
            return limit
    return None


def memory_limits(proc: Path = Path("/proc")) -> Iterator[MemoryLimit]:
    """Yield the limits of the machine and of each group that this process is in."""
    with suppress(*_UNREADABLE):
        sizes = _numbers(proc / "meminfo")
        total = sizes["MemTotal:"] * 1024
        yield MemoryLimit(total, proc / "meminfo", total - sizes["MemAvailable:"] * 1024)
    with suppress(*_UNREADABLE):
        for folder, kind in _groups(proc / "self"):
            with suppress(*_UNREADABLE):  # the process has no limits
                usage, prefix, names = _FILES[kind]
                texts = {folder / name: (folder / name).read_text().strip() for name in names}
                limit, path = min((int(text), path) for path, text in texts.items() if text != "max")
                stat = _numbers(folder / "memory.stat")
                cache = stat[f"{prefix}active_file"] + stat[f"{prefix}inactive_file"]
                yield MemoryLimit(limit, path, int((folder / usage).read_text()) - cache)


def _groups(process: Path) -> Iterator[tuple[Path, str]]:
    """Yield the folders of the groups that a process is in, from the root down, and their versions."""
    own: dict[str, Path] = {}
    for line in (process / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            own["cgroup" if controllers else "cgroup2"] = Path(path)
    for line in (process / "mountinfo").read_text().splitlines():
        head, _, tail = line.partition(" - ")
        kind, _, options = tail.split(" ")[:3]
        if kind in own and (kind == "cgroup2" or "memory" in options.split(",")):
            root, mount = head.split(" ")[3:5]
            yield (folder := Path(mount)), kind
            # Otherwise this is a container, which sees only its own part of the hierarchy.
            is_below = own[kind].is_relative_to(root)
            for name in own[kind].relative_to(root).parts if is_below else ():
                yield (folder := folder / name), kind


def _numbers(file: Path) -> dict[str, int]:
    """Return the number behind each name."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}
