"""CUDA as the transfer engine uses it: streams and events of torch, and CUDA's runtime library.

The meaning of the calls is that of the CUDA Runtime API reference: "Memory Management" for
``cudaMemcpyAsync`` and ``cudaHostRegister``, "Stream Management" for the capture mode, and "API
synchronization behavior" for what is asynchronous when. Importing this touches no device.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import torch

from kvtier import native
from kvtier.device.base import KVCaches
from kvtier.device.lanes import require_device
from kvtier.device.plan import CopyPlan
from kvtier.errors import ConfigError, DeviceLostError, TransferError
from kvtier.memory import numa

_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all contexts of the process
_CAPTURE_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_LOST = frozenset((214, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719))
"""Errors after which, by the reference's words, the process has to be started anew to use the device:
memory, link and hardware errors, and kernels that went wrong."""
_LIBRARY = re.compile(r"/.*/libcudart\b[^/]*\.so[.\d]*$", re.MULTILINE)


def open_runtime(kv_caches: KVCaches) -> TorchRuntime:
    """Return the runtime of the GPU that all tensors are on.

    Raises:
        ConfigError: they are not on one NVIDIA GPU, or CUDA's runtime library is not found.
    """
    if torch.version.hip is not None:  # torch calls AMD's GPUs "cuda" too
        raise ConfigError("torch is built for ROCm, which is not supported yet: AMD GPUs cannot be used")
    require_device(kv_caches, "cuda")
    devices = {tensor.device for tensor in kv_caches.tensors}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"the KV cache of one worker is on several GPUs ({names}); one is possible")
    return TorchRuntime(devices.pop(), Cudart(find_cudart()))


def find_cudart(maps: Path = Path("/proc/self/maps")) -> str:
    """Return the path of the CUDA runtime library that this process has loaded; torch brings it.

    Raises:
        ConfigError: it has loaded none.
    """
    found = _LIBRARY.search(maps.read_text())
    if found is None:
        raise ConfigError(
            "torch has loaded no libcudart.so, which kvtier copies with: install a torch that brings "
            "CUDA's libraries as files of their own, as its wheels do"
        )
    return found.group()


class Cudart:
    """CUDA's runtime library: what torch does not offer. Failing calls raise TransferError.

    Args:
        path: of the library.
    """

    def __init__(self, path: str) -> None:
        self._library = library = ctypes.CDLL(path)
        library.cudaGetErrorString.restype = ctypes.c_char_p
        library.cudaHostRegister.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        library.cudaHostUnregister.argtypes = [ctypes.c_void_p]
        self._memcpy_async = ctypes.cast(library.cudaMemcpyAsync, ctypes.c_void_p).value or 0

    def copy(self, plan: CopyPlan, stream: int) -> None:
        """Give the copies of ``plan`` to the stream of this handle, up to the first that is refused."""
        src, dst, sizes = plan.src.ctypes.data, plan.dst.ctypes.data, plan.sizes.ctypes.data
        code = native.copy_batch_async(self._memcpy_async, src, dst, sizes, len(plan.sizes), stream)
        self._check("cudaMemcpyAsync", code)

    def host_register(self, address: int, nbytes: int) -> None:
        """Pin host memory, for all devices. It gets the pages that it has not got yet."""
        self._check("cudaHostRegister", self._library.cudaHostRegister(address, nbytes, _REGISTER_PORTABLE))

    def host_unregister(self, address: int) -> None:
        """Undo ``host_register``."""
        self._check("cudaHostUnregister", self._library.cudaHostUnregister(address))

    def relax_capture(self) -> None:
        """Let the calling thread pin and copy while another one captures a graph.

        By default a capture forbids such calls to all threads, and is spoilt by them. What this
        thread does is no part of any capture.
        """
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        code = self._library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        self._check("cudaThreadExchangeStreamCaptureMode", code)

    def _check(self, call: str, code: int) -> None:
        if code:
            self._library.cudaGetLastError()  # else torch finds the same error again in this thread
            text = self._library.cudaGetErrorString(code).decode()
            kind = DeviceLostError if code in _LOST else TransferError
            raise kind(f"{call} failed: {text} ({code})")


class TorchStream:
    """A stream of torch's. See ``kvtier.device.cuda.Stream``."""

    def __init__(self, device: torch.device, cudart: Cudart) -> None:
        self._stream = torch.cuda.Stream(device)
        self._cudart = cudart

    def wait(self, event: Any) -> None:
        """See ``Stream.wait``."""
        self._stream.wait_event(event)

    def record(self) -> Any:
        """See ``Stream.record``. Who waits for the event sleeps, instead of turning in a loop."""
        return self._stream.record_event(torch.cuda.Event(enable_timing=True, blocking=True))

    def copy(self, plan: CopyPlan) -> None:
        """See ``Stream.copy``."""
        self._cudart.copy(plan, self._stream.cuda_stream)


class TorchRuntime:
    """One NVIDIA GPU. See ``kvtier.device.cuda.CudaRuntime``.

    Args:
        device: the GPU, with its index.
        cudart: the library that torch uses.
    """

    def __init__(self, device: torch.device, cudart: Cudart) -> None:
        self._device = device
        self._cudart = cudart

    def attach(self) -> None:
        """See ``CudaRuntime.attach``."""
        torch.cuda.set_device(self._device)
        self._cudart.relax_capture()

    def record_compute(self) -> Any:
        """See ``CudaRuntime.record_compute``."""
        return torch.cuda.current_stream(self._device).record_event()

    def node(self) -> int | None:
        """See ``CudaRuntime.node``."""
        it = torch.cuda.get_device_properties(self._device)
        try:
            address = f"{it.pci_domain_id:04x}:{it.pci_bus_id:02x}:{it.pci_device_id:02x}.0"
        except AttributeError:  # an older torch
            return None
        return numa.node_of_pci(address)

    def open_stream(self) -> TorchStream:
        """See ``CudaRuntime.open_stream``."""
        return TorchStream(self._device, self._cudart)

    def host_register(self, address: int, nbytes: int) -> None:
        """See ``CudaRuntime.host_register``."""
        self._cudart.host_register(address, nbytes)

    def host_unregister(self, address: int) -> None:
        """See ``CudaRuntime.host_unregister``."""
        self._cudart.host_unregister(address)
