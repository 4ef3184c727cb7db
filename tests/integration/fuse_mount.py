"""A file system over a directory that is slow, hangs, fails or goes away when it is told to.

It speaks the kernel's FUSE protocol, so what kvtier sees are answers of real system calls. It runs in a
process of its own, ``python -m tests.integration.fuse_mount SOURCE POINT``, which writes a line when it is
mounted and answers each line of JSON on its input, a ``Trouble``, with one line when that holds. When the
process ends, however it ends, the kernel answers whatever waits; ``sweep`` unmounts what dead ones have left.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.integration.fork_server import die_with_parent

_OWNER = "kvtier-trouble-"
_MNT_DETACH = 2
_WRITE_BYTES = 1 << 20
_READERS = 8
_LONG_BYTES = 64 << 10
_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_OPEN = struct.Struct("<QIi")
_INIT_FLAGS = 1 | 1 << 3 | 1 << 5 | 1 << 15 | 1 << 18 | 1 << 22  # async reads, large writes, parallel lookups
_ATIME, _MTIME, _FH, _ATIME_NOW, _MTIME_NOW = 16, 32, 64, 128, 256


@dataclass(frozen=True)
class Trouble:
    """What is wrong with the file system.

    Attributes:
        delay_s: seconds before each system call is attended to.
        hangs: whether none is.
        error: the number of the error that each one ends with; 0 for none.
        damages: whether what is read is not what was written, long reads that is, which are those of chunks.
    """

    delay_s: float = 0.0
    hangs: bool = False
    error: int = 0
    damages: bool = False


class FuseMount:
    """The mounted file system, from the tests' side. A context manager.

    Args:
        source: the directory that its files are in.
        point: the directory to mount it at; made where it is missing.
    """

    def __init__(self, source: Path, point: Path) -> None:
        self._source, self._point = source, point
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> FuseMount:
        self.mount()
        return self

    def __exit__(self, *exc: object) -> None:
        self.die()
        unmount(self._point)

    def mount(self) -> None:
        """Mount it, again where it has died."""
        unmount(self._point)
        self._point.mkdir(exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.fuse_mount", str(self._source), str(self._point)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=Path(__file__).parents[2],
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "mounted\n":
            raise OSError("the file system cannot be mounted")

    def be(self, trouble: Trouble) -> None:
        """Have this trouble from now on."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(trouble)) + "\n")
        assert self._process.stdout.readline()

    def die(self) -> None:
        """Kill it: whatever is asked of its files from now on fails, until it is mounted again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):
                        stream.close()
            self._process = None


def why_not() -> str:
    """Return why nothing can be mounted here; empty where it can."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse: {error.strerror}"
    return "" if os.geteuid() == 0 else "only root mounts"


def memory(point: Path, size_bytes: int, stack: ExitStack) -> Path:
    """Mount a file system in memory of this size, until ``stack`` is left."""
    point.mkdir()
    _mount(f"{_OWNER}{os.getpid()}", point, "tmpfs", f"size={size_bytes}")
    stack.callback(unmount, point)
    return point


def sweep() -> None:
    """Unmount what processes that are dead have left mounted."""
    for line in Path("/proc/mounts").read_text().splitlines():
        owner, point, *_ = line.split()
        if owner.startswith(_OWNER) and not Path("/proc", owner.removeprefix(_OWNER)).exists():
            unmount(Path(point))


def unmount(point: Path) -> None:
    """Unmount what is mounted there, if anything is, whoever uses it."""
    ctypes.CDLL(None).umount2(os.fsencode(point), _MNT_DETACH)


def _mount(source: str, point: Path, kind: str, options: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), os.fsencode(point), kind.encode(), 0, options.encode()):
        raise OSError(ctypes.get_errno(), "cannot be mounted", str(point))


# --- the other side ------------------------------------------------------------------------------


class _Gate:
    """Where each request waits, and learns what becomes of it."""

    def __init__(self) -> None:
        self._trouble = Trouble()
        self._changed = threading.Condition()

    def change(self, trouble: Trouble) -> None:
        with self._changed:
            self._trouble = trouble
            self._changed.notify_all()

    @property
    def damages(self) -> bool:
        return self._trouble.damages

    def pass_through(self) -> None:
        """Wait as long as the trouble has it; raise its error."""
        with self._changed:
            if self._trouble.delay_s:
                slow = self._trouble
                self._changed.wait_for(lambda: self._trouble is not slow, slow.delay_s)
            self._changed.wait_for(lambda: not self._trouble.hangs)
            if self._trouble.error:
                raise OSError(self._trouble.error, "")


class _Nodes:
    """The files that the kernel knows, each by a number. Thread-safe."""

    def __init__(self, root: str) -> None:
        self._lock = threading.Lock()
        self._fds = {1: os.open(root, os.O_PATH | os.O_DIRECTORY)}
        self._numbers: dict[tuple[int, int], int] = {}
        self._counts: dict[int, int] = {}
        self._last = 1

    def fd(self, number: int) -> int:
        """Return a descriptor that only names the file."""
        return self._fds[number]

    def path(self, number: int) -> str:
        """Return a path under which the file can be opened, wherever it is by now."""
        return f"/proc/self/fd/{self._fds[number]}"

    def look_up(self, parent: int, name: bytes) -> tuple[int, os.stat_result]:
        """Count one more reference to a file, known or not."""
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._fds[parent])
        status = os.fstat(fd)
        with self._lock:
            number = self._numbers.get((status.st_dev, status.st_ino))
            if number is None:
                number = self._last = self._last + 1
                self._fds[number], self._numbers[status.st_dev, status.st_ino] = fd, number
            else:
                os.close(fd)
            self._counts[number] = self._counts.get(number, 0) + 1
        return number, status

    def forget(self, number: int, count: int) -> None:
        """Count so many references less."""
        with self._lock:
            if number not in self._counts:
                return
            self._counts[number] -= count
            if self._counts[number] <= 0:
                fd = self._fds.pop(number)
                status = os.fstat(fd)
                self._numbers.pop((status.st_dev, status.st_ino), None)
                del self._counts[number]
                os.close(fd)


class _Server:
    """Answers the kernel's requests."""

    def __init__(self, device: int, root: str) -> None:
        self._device = device
        self._nodes = _Nodes(root)
        self.gate = _Gate()
        self._answers: dict[int, Callable[[int, bytes], bytes]] = {
            1: self._lookup,
            3: self._getattr,
            4: self._setattr,
            9: self._mkdir,
            10: self._unlink,
            11: self._rmdir,
            12: self._rename,
            13: self._link,
            14: self._open,
            15: self._read,
            16: self._write,
            17: self._statfs,
            18: self._release,
            20: self._fsync,
            25: self._nothing,  # flush
            26: self._init,
            27: self._open,
            28: self._readdir,
            29: self._release,
            30: self._fsync,
            35: self._create,
            43: self._fallocate,
            45: self._rename2,
        }

    def serve(self) -> None:
        """Answer requests until the file system is unmounted."""
        while True:
            try:
                request = os.read(self._device, _WRITE_BYTES + (1 << 16))
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):  # it was taken back
                    continue
                return
            _, kind, unique, node, *_ = _IN.unpack_from(request)
            if kind in (2, 42):
                self._forget(kind, node, request[_IN.size :])
            elif kind != 36:  # an interrupted request is answered as any
                self._answer(kind, unique, node, request[_IN.size :])

    def _answer(self, kind: int, unique: int, node: int, body: bytes) -> None:
        error, answer = 0, b""
        try:
            if kind not in self._answers:
                raise OSError(errno.ENOSYS, "")
            if kind not in (18, 26, 29):  # to let go of a file always works
                self.gate.pass_through()
            answer = self._answers[kind](node, body)
        except OSError as failed:
            error = -(failed.errno or errno.EIO)
        except KeyError:
            error = -errno.ESTALE
        with suppress(OSError):  # nobody waits for it any more
            os.write(self._device, _OUT.pack(_OUT.size + len(answer), error, unique) + answer)

    def _forget(self, kind: int, node: int, body: bytes) -> None:
        if kind == 2:
            self._nodes.forget(node, *struct.unpack_from("<Q", body))
            return
        (count,) = struct.unpack_from("<I", body)
        for number, references in struct.iter_unpack("<QQ", body[8 : 8 + 16 * count]):
            self._nodes.forget(number, references)

    # --- requests; the argument is what follows the head -------------------------------------------

    def _init(self, node: int, body: bytes) -> bytes:
        _, minor, ahead, flags = struct.unpack_from("<4I", body)
        answer = (7, min(minor, 31), ahead, flags & _INIT_FLAGS, 64, 48, _WRITE_BYTES, 1, _WRITE_BYTES >> 12)
        return struct.pack("<4IHHIIH", *answer).ljust(64, b"\0")

    def _nothing(self, node: int, body: bytes) -> bytes:
        return b""

    def _lookup(self, node: int, body: bytes) -> bytes:
        return self._entry(node, _name(body))

    def _entry(self, parent: int, name: bytes) -> bytes:
        number, status = self._nodes.look_up(parent, name)
        return struct.pack("<4QII", number, 0, 0, 0, 0, 0) + _attributes(status)

    def _getattr(self, node: int, body: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + _attributes(os.fstat(self._nodes.fd(node)))

    def _setattr(self, node: int, body: bytes) -> bytes:
        given, _, handle, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode = struct.unpack_from(
            "<IIQQQQQQIIII", body
        )
        path = self._nodes.path(node)
        if given & 1:
            os.chmod(path, stat.S_IMODE(mode))
        if given & 8:
            os.truncate(handle if given & _FH else path, size)
        if given & (_ATIME | _MTIME):
            status = os.stat(path)
            times = [status.st_atime_ns, status.st_mtime_ns]
            wanted = ((_ATIME, _ATIME_NOW, atime, atime_ns), (_MTIME, _MTIME_NOW, mtime, mtime_ns))
            for index, (bit, now_bit, seconds, ns) in enumerate(wanted):
                if given & bit:
                    times[index] = time.time_ns() if given & now_bit else seconds * 10**9 + ns
            os.utime(path, ns=(times[0], times[1]))
        return self._getattr(node, b"")

    def _mkdir(self, node: int, body: bytes) -> bytes:
        mode, umask = struct.unpack_from("<II", body)
        os.mkdir(_name(body[8:]), mode & ~umask, dir_fd=self._nodes.fd(node))
        return self._entry(node, _name(body[8:]))

    def _unlink(self, node: int, body: bytes) -> bytes:
        os.unlink(_name(body), dir_fd=self._nodes.fd(node))
        return b""

    def _rmdir(self, node: int, body: bytes) -> bytes:
        os.rmdir(_name(body), dir_fd=self._nodes.fd(node))
        return b""

    def _rename(self, node: int, body: bytes) -> bytes:
        (target,) = struct.unpack_from("<Q", body)
        return self._move(node, target, 0, body[8:])

    def _rename2(self, node: int, body: bytes) -> bytes:
        target, flags = struct.unpack_from("<QI", body)
        return self._move(node, target, flags, body[16:])

    def _move(self, node: int, target: int, flags: int, names: bytes) -> bytes:
        old, new, *_ = names.split(b"\0")
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.renameat2(self._nodes.fd(node), old, self._nodes.fd(target), new, flags):
            raise OSError(ctypes.get_errno(), "")
        return b""

    def _link(self, node: int, body: bytes) -> bytes:
        (source,) = struct.unpack_from("<Q", body)
        name = _name(body[8:])
        os.link(self._nodes.path(source), name, dst_dir_fd=self._nodes.fd(node), follow_symlinks=True)
        return self._entry(node, name)

    def _open(self, node: int, body: bytes) -> bytes:
        (flags,) = struct.unpack_from("<I", body)
        unwanted = os.O_DIRECT | os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL | os.O_APPEND
        return _OPEN.pack(os.open(self._nodes.path(node), flags & ~unwanted), 0, 0)

    def _create(self, node: int, body: bytes) -> bytes:
        flags, mode, umask = struct.unpack_from("<III", body)
        name, flags = _name(body[16:]), flags & ~(os.O_DIRECT | os.O_APPEND)
        handle = os.open(name, flags | os.O_CREAT, mode & ~umask & 0o7777, dir_fd=self._nodes.fd(node))
        return self._entry(node, name) + _OPEN.pack(handle, 0, 0)

    def _read(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        data = os.pread(handle, size, offset)
        if not self.gate.damages or len(data) < _LONG_BYTES:
            return data
        half = _LONG_BYTES // 2
        pieces = [data[at : at + half] for at in range(0, len(data), half)]
        for at in range(1, len(pieces), 2):
            pieces[at - 1], pieces[at] = pieces[at], pieces[at - 1]
        return b"".join(pieces)

    def _write(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        return struct.pack("<II", os.pwrite(handle, memoryview(body)[40 : 40 + size], offset), 0)

    def _statfs(self, node: int, body: bytes) -> bytes:
        found = os.statvfs(self._nodes.path(node))
        counts = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("<5Q3I", *counts, found.f_bsize, found.f_namemax, found.f_frsize).ljust(80, b"\0")

    def _release(self, node: int, body: bytes) -> bytes:
        os.close(*struct.unpack_from("<Q", body))
        return b""

    def _fsync(self, node: int, body: bytes) -> bytes:
        os.fsync(*struct.unpack_from("<Q", body))
        return b""

    def _fallocate(self, node: int, body: bytes) -> bytes:
        handle, offset, length, mode = struct.unpack_from("<QQQI", body)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.fallocate(handle, mode, ctypes.c_long(offset), ctypes.c_long(length)):
            raise OSError(ctypes.get_errno(), "")
        return b""

    def _readdir(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        with os.scandir(self._nodes.path(node)) as entries:
            found = sorted((entry.name.encode(), entry.is_dir(follow_symlinks=False)) for entry in entries)
        answer = b""
        for number, (name, is_folder) in enumerate(found[offset:], offset + 1):
            entry = struct.pack("<QQII", 2**32 + number, number, len(name), 4 if is_folder else 8) + name
            entry = entry.ljust(-(-len(entry) // 8) * 8, b"\0")
            if len(answer) + len(entry) > size:
                break
            answer += entry
        return answer


def _name(body: bytes) -> bytes:
    return body.split(b"\0", 1)[0]


def _attributes(status: os.stat_result) -> bytes:
    times = (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)
    return _ATTR.pack(
        status.st_ino,
        status.st_size,
        status.st_blocks,
        *(ns // 10**9 for ns in times),
        *(ns % 10**9 for ns in times),
        status.st_mode,
        status.st_nlink,
        status.st_uid,
        status.st_gid,
        0,
        status.st_blksize,
        0,
    )


def _main(source: str, point: str) -> None:
    die_with_parent()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    device = os.open("/dev/fuse", os.O_RDWR)
    server = _Server(device, source)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    _mount(f"{_OWNER}{os.getppid()}", Path(point), "fuse.kvtier", options)
    for _ in range(_READERS):
        threading.Thread(target=server.serve, daemon=True).start()
    print("mounted", flush=True)
    for line in sys.stdin:
        server.gate.change(Trouble(**json.loads(line)))
        print("done", flush=True)
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
