"""CUDA as the transfer engine uses it: streams and events of torch, and CUDA's runtime library.

AMD's HIP has the same calls under other names, and torch the same classes for both: ``kvtier.device.rocm``.

The meaning of the calls is that of the CUDA Runtime API reference: "Memory Management" for
``cudaMemcpyAsync`` and its kin and ``cudaHostRegister``, "Stream Management" for the capture mode, and "API
synchronization behavior" for what is asynchronous when. Importing this touches no device.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvtier import native
from kvtier.device._methods import EACH, Choice, Chooser, EachCopy, Method, PinnedMemory, Rows
from kvtier.device._streams import EventPool
from kvtier.device._threaded import CopyQueue
from kvtier.device.base import KVCaches
from kvtier.device.plan import CopyPlan
from kvtier.errors import ConfigError, DeviceLostError, TransferError
from kvtier.memory import numa

_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all contexts of the process
_CAPTURE_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_EITHER_WAY = 4  # cudaMemcpyDefault: the direction is told from the addresses
_LOST = frozenset((214, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719))
"""Errors after which, by the reference's words, the process has to be started anew to use the device:
memory, link and hardware errors, and kernels that went wrong. HIP gives them the same numbers."""

_EXPEDITED_PRIORITY = -1  # torch's streams of higher priority


def only_device(kv_caches: KVCaches) -> torch.device:
    """Return the device that all tensors are on.

    Raises:
        ConfigError: they are on several.
    """
    devices = {tensor.device for tensor in kv_caches.tensors}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"the KV cache of one worker is on several GPUs ({names}); one is possible")
    return devices.pop()


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
        self._function("Memcpy2DAsync").argtypes = [
            *(pointer, size, pointer, size, size, size),
            *(ctypes.c_int, pointer),
        ]
        self._memcpy_async = ctypes.cast(self._function("MemcpyAsync"), pointer).value or 0

    @property
    def driver_version(self) -> int:
        """What the driver can do, as the library's number for it."""
        return self._version("DriverGetVersion")

    @property
    def runtime_version(self) -> int:
        """The library's own version."""
        return self._version("RuntimeGetVersion")

    def copy(self, plan: CopyPlan, stream: int) -> None:
        """Give the copies of ``plan`` to the stream of this handle, up to the first that is refused."""
        src, dst, sizes = plan.src.ctypes.data, plan.dst.ctypes.data, plan.sizes.ctypes.data
        code = native.copy_batch_async(self._memcpy_async, src, dst, sizes, len(plan.sizes), stream)
        self.check("MemcpyAsync", code)

    def copy_rows(self, rows: Rows, stream: int) -> None:
        """Give equally long copies at equal distances in one call."""
        self.call(
            "Memcpy2DAsync",
            *(rows.dst, rows.dst_pitch, rows.src, rows.src_pitch, rows.nbytes, rows.count),
            *(_EITHER_WAY, stream),
        )

    def host_register(self, address: int, nbytes: int) -> None:
        """Pin host memory, for all devices. It gets the pages that it has not got yet."""
        self.call("HostRegister", address, nbytes, _REGISTER_PORTABLE)

    def host_unregister(self, address: int) -> None:
        """Undo ``host_register``."""
        self.call("HostUnregister", address)

    def relax_capture(self) -> None:
        """Let the calling thread pin and copy while another one captures a graph.

        By default a capture forbids such calls to all threads, and is spoilt by them. What this
        thread does is no part of any capture.
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


class TorchStream:
    """A stream of torch's. See ``kvtier.device._streams.Stream``."""

    def __init__(self, device: torch.device, way: CopyQueue, events: EventPool, chooser: Chooser) -> None:
        priority = _EXPEDITED_PRIORITY if way is CopyQueue.EXPEDITED else 0
        self._stream = torch.cuda.Stream(device, priority=priority)
        self._events = events
        self._chooser = chooser

    def wait(self, event: Any) -> None:
        """See ``Stream.wait``."""
        self._stream.wait_event(event)

    def record(self) -> Any:
        """See ``Stream.record``. Who waits for the event sleeps, instead of turning in a loop."""
        return self._stream.record_event(self._events.take())

    def copy(self, plan: CopyPlan) -> None:
        """See ``Stream.copy``."""
        self._chooser.copy(plan, self._stream)


class TorchRuntime:
    """One GPU of torch's. See ``kvtier.device._streams.Runtime``.

    Args:
        device: the GPU, with its index.
        library: the runtime library that torch uses.
        methods: the ways to copy; default: one by one alone.
        choice: which of them when.
    """

    def __init__(
        self,
        device: torch.device,
        library: RuntimeLibrary,
        methods: Mapping[str, Method] | None = None,
        choice: Choice | None = None,
    ) -> None:
        self._device = device
        self._library = library
        self._methods = methods or {EACH: EachCopy(library)}
        self._choice = choice or {}
        self._pinned = PinnedMemory()
        self._events = EventPool(lambda: torch.cuda.Event(enable_timing=True, blocking=True))

    def attach(self) -> None:
        """See ``Runtime.attach``."""
        torch.cuda.set_device(self._device)
        self._library.relax_capture()

    def record_compute(self) -> Any:
        """See ``Runtime.record_compute``."""
        return torch.cuda.current_stream(self._device).record_event(self._events.take())

    def node(self) -> int | None:
        """See ``Runtime.node``."""
        it = torch.cuda.get_device_properties(self._device)
        try:
            address = f"{it.pci_domain_id:04x}:{it.pci_bus_id:02x}:{it.pci_device_id:02x}.0"
        except AttributeError:  # an older torch
            return None
        return numa.node_of_pci(address)

    def open_stream(self, way: CopyQueue, *, plain: bool = False) -> TorchStream:
        """See ``Runtime.open_stream``."""
        choice = {} if plain else self._choice
        return TorchStream(self._device, way, self._events, Chooser(self._methods, choice, way, self._pinned))

    def recycle(self, *events: Any) -> None:
        """See ``Runtime.recycle``."""
        self._events.put_back(*events)

    def host_register(self, address: int, nbytes: int) -> None:
        """See ``Runtime.host_register``."""
        self._library.host_register(address, nbytes)
        self._pinned.add(address, nbytes)

    def host_unregister(self, address: int) -> None:
        """See ``Runtime.host_unregister``."""
        self._pinned.remove(address)
        self._library.host_unregister(address)
