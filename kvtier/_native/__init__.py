"""The native library: one foreign call does a whole job of copies, checksums or file I/O.

``kvtier/_native/build.py`` builds the shared library next to this file. If it is missing, of another version,
or refused by ``KVTIER_NATIVE=0`` in the environment, the functions of this module work in Python, and the
file tier refuses to be configured. ``KVTIER_NATIVE`` may also be the path of another build, such as one with
sanitizers. ``library`` is the loaded library or None, and ``holding`` the same for the few functions that are
called without releasing the interpreter lock. Addresses are plain integers. The caller keeps the memory
behind them alive until the call returns. Any thread may call; calls release the interpreter lock for most of
their time.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvtier._log import GuardedLogger
from kvtier._native import layouts

ABI: Final = 15  # KVT_ABI in kvtier_native.c
LIBRARY_NAME: Final = "libkvtier_native.so"
_MADV_POPULATE_WRITE: Final = 23
_COPY_EITHER_WAY: Final = 4  # as in kvtier_native.c
_CopyAsync: Final = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
)

_Pointers: Final = ctypes.c_uint64 * 5  # struct around
Around = tuple[int, int, int, int, int] | None
"""Addresses of ``cudaStreamWaitEvent`` and ``cudaEventRecord``, then three events: the copies wait for the
first, the second is recorded before them and the third after them."""

_P, _N, _INT, _TEXT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p
_U64, _I64 = ctypes.c_uint64, ctypes.c_int64
_FUNCTIONS: Final[Mapping[str, Sequence[Any]]] = {
    "kvt_copy_batch": (None, _P, _P, _P, _N),
    "kvt_copy_batch_async": (_INT, _P, _P, _P, _P, _N, _P, _P),
    "kvt_copy_groups_async": (_INT, _P, _INT, _P, _P, _P, _P, _N, _N, _P, _P),
    "kvt_populate": (_INT, _P, _N),
    "kvt_files_put": (_I64, _P, _N, _N),
    "kvt_files_get": (_I64, _P, _N, _N),
    "kvt_files_discard": (_I64, _P, _N, _N),
    "kvt_files_contains": (_I64, _P, _N, _N),
    "kvt_files_touch": (None, _P, _N, _N),
    "kvt_pool_open": (_P, _N, _N),
    "kvt_pool_close": (None, _P),
    "kvt_pool_fd": (_INT, _P),
    "kvt_tree_bytes": (_I64, _INT, _TEXT, _P, _P),
    "kvt_tree_remove": (_I64, _INT, _TEXT, _P, _P),
    "kvt_chunks_scan": (_I64, _INT, _TEXT, _P, _P),
    "kvt_chunks_list": (_I64, _INT, _TEXT, _P, _P, _U64),
    "kvt_index_open": (_P,),
    "kvt_index_close": (None, _P),
    "kvt_index_count": (_U64, _P),
    "kvt_index_add_marks": (None, _P, _P, _N),
    "kvt_index_set": (None, _P, _TEXT, _P, _N, _INT),
}
_HOLDING: Final[Mapping[str, Sequence[Any]]] = {
    "kvt_pool_submit": (_INT, _P, _P, _P, _N, _N, _INT, _U64),
    "kvt_pool_ended": (_N, _P, _P, _P, _N),
    "kvt_index_known": (None, _P, _TEXT, _P, _N, _P),
}
"""The type of each function's result, then of its arguments."""

_log = GuardedLogger("kvtier.native")


def _load() -> tuple[ctypes.CDLL | None, str]:
    """Return the loaded library, or None and why. The one place that reads KVTIER_NATIVE."""
    wish = os.environ.get("KVTIER_NATIVE", "1")
    path = Path(wish) if "/" in wish else Path(__file__).with_name(LIBRARY_NAME)
    if wish == "0":
        return None, "KVTIER_NATIVE=0 is set in the environment"
    if not path.exists():
        return None, f"{path} does not exist"
    try:
        library = ctypes.CDLL(str(path))
        wrong = _why_unfit(library)
        if wrong is None:
            _declare(library, _FUNCTIONS)
            return library, ""
        reason = f"{path}: {wrong}"
    except (OSError, AttributeError) as error:
        reason = f"{path} cannot be loaded: {error}"
    _log.warning("native library not loaded (%s): copies are slower, and the tier fs is unavailable", reason)
    return None, reason


def _why_unfit(library: ctypes.CDLL) -> str | None:
    """Return why a library must not be used; None if it may be."""
    found = int(library.kvt_abi())
    if found != ABI:
        return f"built from another version ({found}, not {ABI}): build it again, or reinstall kvtier"
    return layouts.difference(library)


def _declare(library: ctypes.CDLL, functions: Mapping[str, Sequence[Any]]) -> None:
    for name, (result, *arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def _load_holding() -> ctypes.PyDLL | None:
    """Load the non-blocking functions a second time, for calls that keep the interpreter lock.

    After releasing it for a microsecond, a thread would have to queue for it again.
    """
    if library is None:
        return None
    holding = ctypes.PyDLL(library._name)
    _declare(holding, _HOLDING)
    return holding


_loaded: Final = _load()
library: Final = _loaded[0]
missing_because: Final = _loaded[1]
holding: Final = _load_holding()
available: Final[bool] = library is not None


def copy_batch(src: int, dst: int, sizes: int, count: int) -> None:
    """Copy ``count`` ranges of memory, one after the other. They must not overlap.

    ``src``, ``dst`` and ``sizes`` are addresses of arrays of ``count`` uint64: the source, the target and the
    length of each range.
    """
    if library is not None:
        library.kvt_copy_batch(src, dst, sizes, count)
        return
    for source, target, size in _ranges(src, dst, sizes, count):
        ctypes.memmove(target, source, size)


def copy_batch_async(
    function: int, src: int, dst: int, sizes: int, count: int, stream: int, around: Around = None
) -> int:
    """Enqueue ``count`` copies, as in ``copy_batch``, on a stream of an accelerator.

    Args:
        function: address of ``cudaMemcpyAsync``, or of a function with its arguments.
        stream: the stream's handle.
        around: events to wait for and to record; only with the library.

    Returns:
        0, or the error code of the first call that was refused. Copies before it are running.
    """
    if library is not None:
        events = around and _Pointers(*around)
        return int(library.kvt_copy_batch_async(function, src, dst, sizes, count, stream, events))
    assert around is None
    copy = _CopyAsync(function)
    for source, target, size in _ranges(src, dst, sizes, count):
        code = copy(target, source, size, _COPY_EITHER_WAY, stream)
        if code:
            return int(code)
    return 0


def copy_groups_async(
    function: int,
    tells_failed: bool,
    attributes: int,
    arrays: tuple[int, int, int],
    count: int,
    most: int,
    stream: int,
    around: Around = None,
) -> int:
    """Enqueue ``count`` copies on a CUDA stream, at most ``most`` per call. The library must be loaded.

    Args:
        function: address of ``cudaMemcpyBatchAsync``.
        tells_failed: whether it has an argument for the index of the copy that failed, as before CUDA 13.
        attributes: address of a ``cudaMemcpyAttributes`` for all copies.
        arrays: ``src``, ``dst`` and ``sizes`` as in ``copy_batch``.
        around: events to wait for and to record.

    Returns:
        0, or the error code of the first call that was refused. Copies of earlier calls are running.
    """
    assert library is not None
    events = around and _Pointers(*around)
    code = library.kvt_copy_groups_async(
        function, tells_failed, attributes, *arrays, count, most, stream, events
    )
    return int(code)


def _ranges(src: int, dst: int, sizes: int, count: int) -> Iterable[tuple[int, int, int]]:
    numbers = ctypes.c_uint64 * count
    return zip(*(numbers.from_address(array) for array in (src, dst, sizes)), strict=True)


def populate(address: int, length: int) -> int:
    """Allocate memory for each page of the range, without changing its contents. Return 0, or the errno.

    ``address`` is aligned to a page. On kernels before 5.14 it is EINVAL without the library, and nothing is
    done: Python cannot touch a page safely while others write to it.
    """
    if library is not None:
        return int(library.kvt_populate(address, length))
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)
    return ctypes.get_errno() if failed else 0
