"""CUDA as the transfer engine uses it: streams and events of torch, and CUDA's runtime library.

AMD's HIP has the same calls under other names, and torch the same classes for both: ``kvtier._device.rocm``.

The calls are those of the CUDA Runtime API reference: "Memory Management" for ``cudaMemcpyAsync`` and
``cudaHostRegister``, "Stream Management" for the capture mode, and "API synchronization behavior" for what is
asynchronous when. Importing this module touches no device.
"""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvtier import _native as native
from kvtier._device._methods import Method, PinnedMemory, require_right
from kvtier._device.base import CopyQueue
from kvtier._device.plan import CopyPlan
from kvtier._memory import numa
from kvtier.errors import ConfigError, DeviceLostError, TransferError

logger = logging.getLogger("kvtier.device")

_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all contexts of the process
_CAPTURE_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_LOST = frozenset((214, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719))
"""Errors after which, by the reference's words, the process has to be restarted to use the device: memory,
link and hardware errors, and kernels that went wrong. HIP gives them the same numbers."""

_EXPEDITED_PRIORITY = -1  # torch's streams of higher priority


def find_library(name: str, maps: Path = Path("/proc/self/maps")) -> str:
    """Return the path of a runtime library that this process has loaded; torch brings it.

    Args:
        name: such as ``libcudart``.

    Raises:
        ConfigError: it has loaded none.
    """
    found = re.search(rf"/.*/{name}\b[^/]*\.so[.\d]*$", maps.read_text(), re.MULTILINE)
    if found is None:
        raise ConfigError(
            f"torch has loaded no {name}.so, which kvtier copies with: install a torch that brings "
            "its device's libraries as files of their own, as its wheels do"
        )
    return found.group()


class RuntimeLibrary:
    """A device's runtime library: what torch does not offer. Failing calls raise TransferError.

    Args:
        path: of the library.
        prefix: that the names of its functions begin with.
    """

    def __init__(self, path: str, prefix: str = "cuda") -> None:
        self._library = ctypes.CDLL(path)
        self._prefix = prefix
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._function("GetErrorString").restype = ctypes.c_char_p
        self._function("HostRegister").argtypes = [pointer, size, ctypes.c_uint]
        self._function("HostUnregister").argtypes = [pointer]
        self._memcpy_async = ctypes.cast(self._function("MemcpyAsync"), pointer).value or 0

    @property
    def driver_version(self) -> int:
        """The version that the driver supports, as the library's number for it."""
        return self._version("DriverGetVersion")

    @property
    def runtime_version(self) -> int:
        """The library's own version."""
        return self._version("RuntimeGetVersion")

    def copy(self, plan: CopyPlan, stream: Any) -> None:
        """Give the copies of ``plan`` to a torch stream one by one, up to the first that is refused."""
        src, dst, sizes = plan.src.ctypes.data, plan.dst.ctypes.data, plan.sizes.ctypes.data
        count, handle = len(plan.sizes), stream.cuda_stream
        code = native.copy_batch_async(self._memcpy_async, src, dst, sizes, count, handle)
        self.check("MemcpyAsync", code)

    def host_register(self, address: int, nbytes: int) -> None:
        """Pin host memory, for all devices. Pages that are not backed yet are allocated."""
        self.call("HostRegister", address, nbytes, _REGISTER_PORTABLE)

    def host_unregister(self, address: int) -> None:
        """Undo ``host_register``."""
        self.call("HostUnregister", address)

    def relax_capture(self) -> None:
        """Let the calling thread pin and copy while another one captures a graph.

        By default a capture forbids such calls to all threads, and fails when one is made. What this thread
        does is no part of any capture.
        """
        self.call("ThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_CAPTURE_RELAXED)))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library.

        Raises:
            TransferError: it failed. DeviceLostError: so that the device cannot be used any more.
        """
        self.check(name, self._function(name)(*arguments))

    def check(self, name: str, code: int) -> None:
        """Raise what ``call`` raises for this code."""
        if code:
            self._function("GetLastError")()  # else torch finds the same error again in this thread
            text = self._function("GetErrorString")(code).decode()
            kind = DeviceLostError if code in _LOST else TransferError
            raise kind(f"{self._prefix}{name} failed: {text} ({code})")

    def _function(self, name: str) -> Any:
        return getattr(self._library, self._prefix + name)

    def _version(self, name: str) -> int:
        number = ctypes.c_int()
        self.call(name, ctypes.byref(number))
        return number.value


def first_right(device: torch.device, methods: Mapping[str, Method]) -> Method | None:
    """Return the first of these ways to make all copies in one call that copies right, or None."""
    stream = torch.cuda.Stream(device)
    for name, method in methods.items():
        try:
            with torch.cuda.device(device):
                require_right(method, device, stream)
        except Exception as error:  # a driver that is too old, say, or no memory left
            logger.info("copy method %r not used: %s", name, error)
        else:
            return method
    return None


def _new_event() -> Any:
    return torch.cuda.Event(enable_timing=True, blocking=True)


class TorchStream:
    """A ``kvtier._device._streams.Stream`` of torch's.

    Waiting for its events, a thread sleeps instead of spinning.

    Args:
        device: the GPU.
        queue: whose plans it is given.
        each: makes one call for each copy.
        batched: makes one call for all; used where the host memory of all copies is pinned.
        pinned: the host memory that is.
    """

    def __init__(
        self,
        device: torch.device,
        queue: CopyQueue,
        each: Method,
        batched: Method | None,
        pinned: PinnedMemory,
    ) -> None:
        priority = _EXPEDITED_PRIORITY if queue is CopyQueue.EXPEDITED else 0
        self._stream = torch.cuda.Stream(device, priority=priority)
        self._each = each
        self._batched = batched
        self._pinned = pinned
        self._is_store = queue is CopyQueue.STORE

    def wait(self, event: Any) -> None:
        self._stream.wait_event(event)

    def record(self) -> Any:
        return self._stream.record_event(_new_event())

    def copy(self, plan: CopyPlan) -> None:
        method, host = self._each, plan.dst if self._is_store else plan.src
        if self._batched is not None and len(host) > 1 and self._pinned.holds(host, plan.sizes):
            method = self._batched
        method(plan, self._stream)


class TorchRuntime:
    """One GPU of torch's: a ``kvtier._device._streams.Runtime``.

    Args:
        device: the GPU, with its index.
        library: the runtime library that torch uses.
        batched: makes many copies in one call; None where there is no such way.
    """

    def __init__(self, device: torch.device, library: RuntimeLibrary, batched: Method | None = None) -> None:
        self._device = device
        self._library = library
        self._batched = batched
        self._pinned = PinnedMemory()

    def attach(self) -> None:
        torch.cuda.set_device(self._device)
        self._library.relax_capture()

    def record_compute(self) -> Any:
        return torch.cuda.current_stream(self._device).record_event(_new_event())

    def node(self) -> int | None:
        it = torch.cuda.get_device_properties(self._device)
        try:
            address = f"{it.pci_domain_id:04x}:{it.pci_bus_id:02x}:{it.pci_device_id:02x}.0"
        except AttributeError:  # an older torch
            return None
        return numa.node_of_pci(address)

    def open_stream(self, queue: CopyQueue, *, plain: bool = False) -> TorchStream:
        batched = None if plain else self._batched
        return TorchStream(self._device, queue, self._library.copy, batched, self._pinned)

    def host_register(self, address: int, nbytes: int) -> None:
        self._library.host_register(address, nbytes)
        self._pinned.add(address, nbytes)

    def host_unregister(self, address: int) -> None:
        self._pinned.clear()
        self._library.host_unregister(address)
