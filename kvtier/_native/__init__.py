"""The native helper: one foreign call does a whole job of copies, checksums or file I/O.

The shared library beside this file is built by ``kvtier/_native/build.py``. Where it is missing, of
another version, or refused by ``KVTIER_NATIVE=0`` in the environment, the same functions work in
pure Python. ``KVTIER_NATIVE`` may also be the path of another build, such as one with sanitizers.
``available`` says whether there is one, and ``missing_because`` why not; ``library`` is the loaded library or
None, and ``holding`` the same for the few functions that are called without releasing the interpreter lock.

Addresses are plain integers. Who calls keeps the memory behind them alive until the call returns.
All calls release the interpreter lock for most of their time and can be made from any thread.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from pathlib import Path
from typing import Final

import crc32c as _crc32c

from kvtier._native import layouts

ABI: Final = 11  # KVT_ABI in kvtier_native.c
LIBRARY_NAME: Final = "libkvtier_native.so"
_MADV_POPULATE_WRITE: Final = 23
_COPY_EITHER_WAY: Final = 4  # as in kvtier_native.c
_CopyAsync: Final = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
)

_log = logging.getLogger("kvtier.native")


def _load() -> tuple[ctypes.CDLL | None, str]:
    """Return the loaded library, or None and why. The one place that reads KVTIER_NATIVE."""
    wish = os.environ.get("KVTIER_NATIVE", "1")
    path = Path(wish) if "/" in wish else Path(__file__).with_name(LIBRARY_NAME)
    if wish == "0":
        return None, "KVTIER_NATIVE=0 is set in the environment"
    if not path.exists():
        return None, f"{path} does not exist: kvtier was installed without a wheel for this platform"
    try:
        library = ctypes.CDLL(str(path))
        wrong = _why_unfit(library)
        if wrong is None:
            _declare(library)
            return library, ""
        reason = f"{path}: {wrong}"
    except (OSError, AttributeError) as error:
        reason = f"{path} cannot be loaded: {error}"
    _log.warning("native helper not used (%s); Python does its work", reason)
    return None, reason


def _why_unfit(library: ctypes.CDLL) -> str | None:
    """Return why a library must not be used; None if it may be."""
    found = int(library.kvt_abi())
    return f"version {found}, not {ABI}" if found != ABI else layouts.difference(library)


def _declare(library: ctypes.CDLL) -> None:
    address, size, u32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32
    library.kvt_copy_batch.argtypes = [address, address, address, size]
    library.kvt_copy_batch.restype = None
    library.kvt_copy_batch_async.argtypes = [address, address, address, address, size, address]
    library.kvt_copy_batch_async.restype = ctypes.c_int
    library.kvt_crc32c.argtypes = [u32, address, size]
    library.kvt_crc32c.restype = u32
    library.kvt_populate.argtypes = [address, size]
    library.kvt_populate.restype = ctypes.c_int
    for name in ("kvt_files_put", "kvt_files_get", "kvt_files_contains", "kvt_files_discard"):
        getattr(library, name).argtypes = [address, size, size]
        getattr(library, name).restype = ctypes.c_int64
    library.kvt_files_contains.restype = None
    library.kvt_pool_open.argtypes = [size, size]
    library.kvt_pool_open.restype = address
    library.kvt_pool_close.argtypes = [address]
    library.kvt_pool_close.restype = None
    library.kvt_pool_fd.argtypes = [address]
    library.kvt_pool_fd.restype = ctypes.c_int
    for name in ("kvt_tree_bytes", "kvt_tree_remove"):
        getattr(library, name).argtypes = [ctypes.c_int, ctypes.c_char_p, address, address]
        getattr(library, name).restype = ctypes.c_int64
    library.kvt_files_touch.argtypes = [address, size, size]
    library.kvt_files_touch.restype = None
    library.kvt_chunks_scan.argtypes = [ctypes.c_int, ctypes.c_char_p, address, address]
    library.kvt_chunks_scan.restype = ctypes.c_int64
    library.kvt_chunks_list.argtypes = [ctypes.c_int, ctypes.c_char_p, address, address, ctypes.c_uint64]
    library.kvt_chunks_list.restype = ctypes.c_int64
    _declare_index(library)


def _declare_index(library: ctypes.CDLL) -> None:
    address, size = ctypes.c_void_p, ctypes.c_size_t
    library.kvt_index_open.argtypes = []
    library.kvt_index_open.restype = address
    library.kvt_index_close.argtypes = library.kvt_index_count.argtypes = [address]
    library.kvt_index_close.restype = None
    library.kvt_index_count.restype = ctypes.c_uint64
    library.kvt_index_add_marks.argtypes = [address, address, size]
    library.kvt_index_add_marks.restype = None
    library.kvt_index_set.argtypes = [address, ctypes.c_char_p, address, size, ctypes.c_int]
    library.kvt_index_set.restype = None


def _load_holding() -> ctypes.PyDLL | None:
    """Load the functions that wait for nothing once more: calls of these keep the interpreter lock.

    To give it away for a microsecond is to queue for it again.
    """
    if library is None:
        return None
    address, size = ctypes.c_void_p, ctypes.c_size_t
    holding = ctypes.PyDLL(library._name)
    holding.kvt_pool_submit.argtypes = [address] * 3 + [size] * 2 + [ctypes.c_int, ctypes.c_uint64]
    holding.kvt_pool_submit.restype = ctypes.c_int
    holding.kvt_pool_ended.argtypes = [address, address, address, size]
    holding.kvt_pool_ended.restype = size
    holding.kvt_index_known.argtypes = [address, ctypes.c_char_p, address, size, address]
    holding.kvt_index_known.restype = None
    return holding


_loaded: Final = _load()
library: Final = _loaded[0]
missing_because: Final = _loaded[1]
holding: Final = _load_holding()
available: Final[bool] = library is not None


def copy_batch(src: int, dst: int, sizes: int, count: int) -> None:
    """Copy ``count`` ranges of memory, one after the other.

    Args:
        src: address of an array of ``count`` uint64: where each range is.
        dst: address of such an array: where each range goes. Ranges must not overlap.
        sizes: address of such an array: bytes of each range.
        count: how many ranges.
    """
    if library is not None:
        library.kvt_copy_batch(src, dst, sizes, count)
        return
    numbers = ctypes.c_uint64 * count
    for source, target, size in zip(
        numbers.from_address(src), numbers.from_address(dst), numbers.from_address(sizes), strict=True
    ):
        ctypes.memmove(target, source, size)


def copy_batch_async(function: int, src: int, dst: int, sizes: int, count: int, stream: int) -> int:
    """Give ``count`` copies to a stream of an accelerator, with the accelerator's own function.

    Args:
        function: address of ``cudaMemcpyAsync``, or of a function with its arguments.
        src, dst, sizes, count: as in ``copy_batch``; addresses as the accelerator sees them.
        stream: the stream's handle.

    Returns:
        0, or the error code of the first copy that was refused. Those before it are under way.
    """
    if library is not None:
        return int(library.kvt_copy_batch_async(function, src, dst, sizes, count, stream))
    copy = _CopyAsync(function)
    numbers = ctypes.c_uint64 * count
    for source, target, size in zip(
        numbers.from_address(src), numbers.from_address(dst), numbers.from_address(sizes), strict=True
    ):
        code = copy(target, source, size, _COPY_EITHER_WAY, stream)
        if code:
            return int(code)
    return 0


def crc32c(address: int, length: int, value: int = 0) -> int:
    """Return the CRC-32C of ``length`` bytes at ``address``, going on from ``value``."""
    if library is not None:
        return int(library.kvt_crc32c(value, address, length))
    return _crc32c.crc32c((ctypes.c_char * length).from_address(address), value)


def populate(address: int, length: int) -> int:
    """Allocate memory for each page of the range, without changing its contents.

    Args:
        address: start of the range, aligned to a page.
        length: bytes.

    Returns:
        0, or the errno. EINVAL without the library and on kernels before 5.14; nothing was done then,
        because Python cannot touch a page safely while others write to it.
    """
    if library is not None:
        return int(library.kvt_populate(address, length))
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "madvise"):
        return errno.ENOSYS
    failed = libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)
    return ctypes.get_errno() if failed else 0


__all__ = [
    "ABI",
    "LIBRARY_NAME",
    "available",
    "copy_batch",
    "copy_batch_async",
    "crc32c",
    "holding",
    "library",
    "missing_because",
    "populate",
]
