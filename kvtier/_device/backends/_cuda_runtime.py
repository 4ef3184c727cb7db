"""CUDA for the transfer engine: streams and events of torch, and CUDA's runtime library.

AMD's HIP has the same calls under other names, and torch the same classes for both: see the backend ``rocm``.
The CUDA Runtime API reference describes the calls: "Memory Management" for ``cudaMemcpyAsync`` and
``cudaHostRegister``, "Stream Management" for the capture mode, and "API synchronization behavior" for
asynchrony. Importing this module touches no device.
"""

from __future__ import annotations

import ctypes
import importlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from kvtier import _native as native
from kvtier._device._runtime import Event, Runtime, Stream
from kvtier._device.base import CopyQueue
from kvtier._device.plan import CopyPlan
from kvtier._log import GuardedLogger
from kvtier._memory import numa
from kvtier.errors import ConfigError, DeviceLostError, TransferError

logger = GuardedLogger("kvtier.device")

_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all contexts of the process
_EVENT_BLOCKING = 1  # cudaEventBlockingSync
_CAPTURE_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_NOT_READY = 600  # cudaErrorNotReady
_LOST = frozenset((214, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719))
"""Errors after which, by the reference, the process has to be restarted to use the device: memory, link and
hardware errors, and failed kernels. HIP gives them the same numbers."""

_EXPEDITED_PRIORITY = -1  # torch's streams of higher priority
_PROBE_COPIES, _PROBE_BYTES = 64, 4096

CopyMethod = Callable[[CopyPlan, Any, native.Around], None]
"""Gives the copies of a plan, at least one, to a torch stream, with events around them. Raises if one is
refused; earlier ones are then in flight."""


class PageKernel(Protocol):
    """Copies many small pages to the device in one kernel."""

    def suits(self, plan: CopyPlan) -> bool:
        """Return whether to use it for these copies, whose host memory is pinned."""

    def copy(self, plan: CopyPlan, stream: Any, around: native.Around) -> None:
        """Enqueue the copies of a plan on a torch stream, without events."""


_TORCH_LIBRARIES = Path(torch.__file__).with_name("lib")


def find_library(name: str, folder: Path = _TORCH_LIBRARIES) -> str:
    """Return the path of torch's library ``name``, through which its runtime's functions are found.

    A process can hold several copies of CUDA's runtime: torchvision brings one. A handle of torch's library
    finds the functions of the copy that torch itself calls. ConfigError if torch has no such library.
    """
    path = folder / f"{name}.so"
    if not path.exists():
        raise ConfigError(
            f"torch has no {path}, which kvtier needs for copies: install one of PyTorch's wheels"
        )
    return str(path)


class RuntimeLibrary:
    """Functions of a runtime library that torch does not offer; their names start with ``prefix``.

    ``path`` is the path of the library, or of a library linked to it; ``prefix`` is ``cuda`` or ``hip``.
    ConfigError if the functions are missing: torch was linked statically. A failed call raises TransferError,
    or DeviceLostError if the device is unusable from then on.
    """

    def __init__(self, path: str, prefix: str = "cuda") -> None:
        self._library = ctypes.CDLL(path)
        self._prefix = prefix
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        try:
            self._function("GetErrorString").restype = ctypes.c_char_p
        except AttributeError:
            raise ConfigError(
                f"{path} is not linked to a shared {prefix} runtime, which kvtier needs for copies: install "
                "one of PyTorch's wheels"
            ) from None
        self._function("HostRegister").argtypes = [pointer, size, ctypes.c_uint]
        self._function("HostUnregister").argtypes = [pointer]
        self._function("EventSynchronize").argtypes = [pointer]
        self._function("EventRecord").argtypes = [pointer, pointer]
        self._function("StreamWaitEvent").argtypes = [pointer, pointer, ctypes.c_uint]
        holding = ctypes.PyDLL(path)  # For functions that never wait. The thread keeps the interpreter lock.
        self._elapsed_time = getattr(holding, f"{prefix}EventElapsedTime")
        self._elapsed_time.argtypes = [pointer, pointer, pointer]
        self._event_query = getattr(holding, f"{prefix}EventQuery")
        self._event_query.argtypes = [pointer]
        self._get_last_error = getattr(holding, f"{prefix}GetLastError")
        self._free_events: deque[int] = deque()
        self._memcpy_async = self._address("MemcpyAsync")
        self._around = self._address("StreamWaitEvent"), self._address("EventRecord")

    def version(self, of: str) -> int:
        """Return the version number of the "Runtime", or the newest that the "Driver" supports."""
        number = ctypes.c_int()
        self.call(f"{of}GetVersion", ctypes.byref(number))
        return number.value

    def copy(self, plan: CopyPlan, stream: Any, around: native.Around = None) -> None:
        """Enqueue the copies of ``plan`` on a torch stream one by one, up to the first that is refused."""
        src, dst, sizes = plan.src.ctypes.data, plan.dst.ctypes.data, plan.sizes.ctypes.data
        count, handle = len(plan.sizes), stream.cuda_stream
        code = native.copy_batch_async(self._memcpy_async, src, dst, sizes, count, handle, around)
        self.check("MemcpyAsync", code)

    def event(self) -> RuntimeEvent:
        """Return an event of the thread's current device."""
        try:
            return RuntimeEvent(self, self._free_events.popleft())
        except IndexError:
            made = ctypes.c_void_p()
            self.call("EventCreateWithFlags", ctypes.byref(made), _EVENT_BLOCKING)
            return RuntimeEvent(self, made.value or 0)

    def free_event(self, handle: int) -> None:
        """Keep an event for its next use. Streams that wait for it keep waiting for the earlier record."""
        self._free_events.append(handle)

    def around(self, after: Any, start: RuntimeEvent, end: RuntimeEvent) -> native.Around:
        """Return the events of a transfer for the native library."""
        return *self._around, after.cuda_event, start.cuda_event, end.cuda_event

    def elapsed_ms(self, start: RuntimeEvent, end: RuntimeEvent) -> float:
        found = ctypes.c_float()
        code = self._elapsed_time(ctypes.byref(found), start.cuda_event, end.cuda_event)
        self.check("EventElapsedTime", code)
        return found.value

    def has_ended(self, event: RuntimeEvent) -> bool:
        """Return whether the work before an event is done, or has failed."""
        if self._event_query(event.cuda_event) != _NOT_READY:
            return True
        # Otherwise torch would later find this status in the thread and raise it as an error.
        self._get_last_error()
        return False

    def host_register(self, address: int, nbytes: int) -> None:
        """Pin host memory, for all devices. Pages that are not backed yet are allocated."""
        self.call("HostRegister", address, nbytes, _REGISTER_PORTABLE)

    def device_address(self, address: int) -> int:
        """Return the address that kernels use for this address of pinned host memory."""
        found = ctypes.c_void_p()
        self.call("HostGetDevicePointer", ctypes.byref(found), ctypes.c_void_p(address), 0)
        return found.value or 0

    def host_unregister(self, address: int) -> None:
        self.call("HostUnregister", address)

    def relax_capture(self) -> None:
        """Allow the calling thread to pin and copy while another captures a graph, which fails by default."""
        self.call("ThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_CAPTURE_RELAXED)))

    def call(self, name: str, *arguments: Any) -> None:
        self.check(name, self._function(name)(*arguments))

    def check(self, name: str, code: int) -> None:
        """Raise the exception of ``call`` for this code."""
        if code:
            # Otherwise torch would find the same error again in this thread.
            self._function("GetLastError")()
            text = self._function("GetErrorString")(code).decode()
            kind = DeviceLostError if code in _LOST else TransferError
            raise kind(f"{self._prefix}{name} failed: {text} ({code})")

    def _function(self, name: str) -> Any:
        return getattr(self._library, self._prefix + name)

    def _address(self, name: str) -> int:
        return ctypes.cast(self._function(name), ctypes.c_void_p).value or 0


class RuntimeEvent:
    """An event of the runtime library. A thread that waits for it sleeps instead of spinning.

    Torch's own would take the interpreter lock again after each record, and when it is freed.
    """

    __slots__ = ("_library", "cuda_event")

    def __init__(self, library: RuntimeLibrary, handle: int) -> None:
        self._library = library
        self.cuda_event = handle

    def __del__(self) -> None:
        self._library.free_event(self.cuda_event)

    def synchronize(self) -> None:
        self._library.call("EventSynchronize", self.cuda_event)

    def query(self) -> bool:
        return self._library.has_ended(self)

    def elapsed_time(self, end_event: RuntimeEvent, /) -> float:
        return self._library.elapsed_ms(self, end_event)


def require_exact(method: CopyMethod, device: torch.device, stream: Any) -> None:
    """Copy scattered ranges to the device and back; raise ValueError if any byte is wrong."""
    random, pinned = np.random.default_rng(1), device.type != "cpu"
    nbytes = 2 * _PROBE_COPIES * _PROBE_BYTES
    content = torch.from_numpy(random.integers(0, 256, nbytes, np.uint8))
    buffers = (
        content.pin_memory() if pinned else content,
        torch.zeros(nbytes, dtype=torch.uint8, device=device),
        torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned),
    )
    places = [random.permutation(_PROBE_COPIES) * 2 * _PROBE_BYTES for _ in buffers]
    addresses = [
        at.astype(np.uint64) + np.uint64(buffer.data_ptr())
        for at, buffer in zip(places, buffers, strict=True)
    ]
    if pinned:  # A different stream from that of the copies fills it.
        torch.accelerator.synchronize(device)
    sizes = np.full(_PROBE_COPIES, _PROBE_BYTES, dtype=np.uint64)
    for start, end in pairwise(addresses):
        method(CopyPlan(start, end, sizes), stream, None)
    stream.synchronize()
    for buffer, targets in zip(buffers[1:], places[1:], strict=True):
        expected = torch.zeros_like(content)
        for origin, target in zip(places[0].tolist(), targets.tolist(), strict=True):
            expected[target : target + _PROBE_BYTES] = content[origin : origin + _PROBE_BYTES]
        if not torch.equal(buffer.cpu(), expected):
            raise ValueError("it copied wrong bytes")


def _is_exact(device: torch.device, name: str, method: CopyMethod) -> bool:
    """Return whether a method makes all copies exactly; log why it does not."""
    try:
        with torch.cuda.device(device):
            require_exact(method, device, torch.cuda.Stream(device))
    except Exception as error:  # for example, the driver is too old, or memory is exhausted
        logger.info("copy method %r not used: %s", name, error)
        return False
    return True


def _open_kernel(device: torch.device) -> PageKernel | None:
    """Return the kernel for small pages, compiled and tested; None if that fails, as without Triton."""
    try:
        kernel: PageKernel = importlib.import_module("kvtier._device.backends._page_kernel")
    except Exception as error:  # Failure of an optional part must not end the engine.
        logger.info("copy kernel not used: %s", error)
        return None
    return kernel if _is_exact(device, "kernel", kernel.copy) else None


class TorchStream(Stream):
    """A torch ``Stream``, with events of the runtime library."""

    def __init__(self, runtime: TorchRuntime, queue: CopyQueue, *, plain: bool = False) -> None:
        priority = _EXPEDITED_PRIORITY if queue is CopyQueue.EXPEDITED else 0
        self._stream = torch.cuda.Stream(runtime.device, priority=priority)
        self._runtime = runtime
        self._plain = plain
        self._is_store = queue is CopyQueue.STORE

    def wait(self, event: Any) -> None:
        self._runtime.library.call("StreamWaitEvent", self._stream.cuda_stream, event.cuda_event, 0)

    def record(self) -> RuntimeEvent:
        event = self._runtime.library.event()
        self._runtime.library.call("EventRecord", event.cuda_event, self._stream.cuda_stream)
        return event

    def copy(self, plan: CopyPlan) -> None:
        method, kernel = self._method(plan), self._runtime.kernel
        try:
            method(plan, self._stream, None)
        except Exception:
            if kernel is not None and method == kernel.copy:  # for example, there is no memory for its table
                self._runtime.kernel = None
                logger.warning("copy kernel failed and is not used again: loads of small pages are slower")
            raise

    def start_transfer(self, after: Any, plan: CopyPlan) -> tuple[Event, Event]:
        """Enqueue the copies with both events in one foreign call, if one call can make them."""
        method, kernel = self._method(plan), self._runtime.kernel
        if not native.available or (kernel is not None and method == kernel.copy):
            return super().start_transfer(after, plan)
        library = self._runtime.library
        start, end = library.event(), library.event()
        try:
            method(plan, self._stream, library.around(after, start, end))
        except BaseException:
            self.record().synchronize()
            raise
        return start, end

    def _method(self, plan: CopyPlan) -> CopyMethod:
        """Return the method for these copies. Stores are not urgent, so they never slow down computing."""
        (first, last), (start, end) = plan.host, self._runtime.pinned
        if self._plain or len(plan.sizes) < 2 or first < start or last > end:
            return self._runtime.library.copy
        kernel = None if self._is_store else self._runtime.kernel
        if kernel is not None and kernel.suits(plan):
            return kernel.copy
        return self._runtime.batched or self._runtime.library.copy


class TorchRuntime(Runtime):
    """One torch GPU. ``batched`` makes many copies in one call, ``kernel`` copies small pages to it."""

    def __init__(
        self,
        device: torch.device,
        library: RuntimeLibrary,
        batched: CopyMethod | None = None,
        kernel: PageKernel | None = None,
    ) -> None:
        self.device = device
        self.library = library
        self.batched = batched
        self.kernel = kernel
        self.pinned = (0, 0)  # Start and end of the pinned host memory. Only one thread changes them.

    @classmethod
    def open(
        cls, device: torch.device, library: RuntimeLibrary, batched: CopyMethod | None = None
    ) -> TorchRuntime:
        """Return the runtime with ``batched``, if it copies exactly, and with the kernel for small pages.

        Both are tried in another thread: vLLM takes the stream last set in its own thread for its own.
        """
        with ThreadPoolExecutor(1, "kvtier-probe") as thread:
            if batched and not thread.submit(_is_exact, device, "batched", batched).result():
                batched = None
            kernel = thread.submit(_open_kernel, device).result()
        return cls(device, library, batched, kernel)

    def attach(self) -> None:
        torch.cuda.set_device(self.device)
        self.library.relax_capture()

    def record_compute(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event(torch.cuda.Event(blocking=True))

    def node(self) -> int | None:
        it = torch.cuda.get_device_properties(self.device)
        try:
            address = f"{it.pci_domain_id:04x}:{it.pci_bus_id:02x}:{it.pci_device_id:02x}.0"
        except AttributeError:  # an older torch
            return None
        return numa.node_of_pci(address)

    def open_stream(self, queue: CopyQueue, *, plain: bool = False) -> TorchStream:
        return TorchStream(self, queue, plain=plain)

    def host_register(self, address: int, nbytes: int) -> None:
        """Pin the next piece of the slots. It starts at the end of the previous piece."""
        self.library.host_register(address, nbytes)
        self.pinned = (self.pinned[0] or address, address + nbytes)
        if self.kernel is not None and not self._is_mapped(address):
            self.kernel = None  # The kernel uses host addresses.

    def _is_mapped(self, address: int) -> bool:
        """Return whether kernels can use the host's addresses for pinned memory."""
        try:
            return self.library.device_address(address) == address
        except DeviceLostError:
            raise
        except TransferError:
            return False

    def host_unregister(self, address: int) -> None:
        self.pinned = (0, 0)
        self.library.host_unregister(address)
