"""CUDA's runtime library as it is called, with a library in its place that was compiled for the test."""

from __future__ import annotations

import ctypes
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

from kvtier import native
from kvtier.device.cuda_runtime import Cudart, find_cudart
from kvtier.device.plan import CopyPlan
from kvtier.errors import ConfigError, TransferError
from kvtier.native import build

STUB = """
#include <stddef.h>
#include <string.h>

typedef struct stream *cudaStream_t;
_Thread_local int last_error, capture_mode;
void *registered, *unregistered, *used_stream;
size_t registered_bytes;
unsigned flags;
int fails;

static int end(int code) { if (code) last_error = code; return code; }
const char *cudaGetErrorString(int code) { return code == 2 ? "out of memory" : "invalid argument"; }
int cudaGetLastError(void) { int code = last_error; last_error = 0; return code; }
int peek_error(void) { return last_error; }
int peek_mode(void) { return capture_mode; }

int cudaMemcpyAsync(void *dst, const void *src, size_t count, int kind, cudaStream_t stream)
{
    if (fails || kind != 4)
        return end(1);
    used_stream = stream;
    memcpy(dst, src, count);
    return 0;
}
int cudaHostRegister(void *ptr, size_t size, unsigned given)
{
    registered = ptr, registered_bytes = size, flags = given;
    return end(fails ? 2 : 0);
}
int cudaHostUnregister(void *ptr) { unregistered = ptr; return end(fails ? 1 : 0); }
int cudaThreadExchangeStreamCaptureMode(int *mode)
{
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return 0;
}
"""
ADDRESS = 2**47 - 4096


@pytest.fixture(scope="module")
def stub_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        compiler = build.compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("cudart")
    (folder / "stub.c").write_text(STUB)
    library = folder / "stub.so"  # by no name that find_cudart would find
    subprocess.run(
        [*compiler, "-std=c11", "-shared", "-fPIC", "-o", library, folder / "stub.c"], check=True, timeout=60
    )
    return library


@pytest.fixture
def stub(stub_path: Path):
    """The library's own variables: ``stub(name)``, of the type of its address or given."""
    library = ctypes.CDLL(str(stub_path))
    fails = ctypes.c_int.in_dll(library, "fails")
    fails.value = 0
    yield lambda name, kind=ctypes.c_void_p: kind.in_dll(library, name)
    fails.value = 0


@pytest.fixture(params=["native", "python"])
def cudart(request: pytest.FixtureRequest, stub_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cudart:
    if request.param == "python":
        monkeypatch.setattr(native, "library", None)
    elif not native.available:
        pytest.skip("the native helper is not built")
    return Cudart(str(stub_path))


def make_plan(src: np.ndarray, dst: np.ndarray) -> CopyPlan:
    """Copy the first 8 bytes and the last 8."""
    offsets = np.array([0, src.nbytes - 8], dtype=np.uint64)
    sizes = np.array([8, 8], dtype=np.uint64)
    return CopyPlan(offsets + np.uint64(src.ctypes.data), offsets + np.uint64(dst.ctypes.data), sizes, 16)


def test_copies_go_to_the_stream(cudart: Cudart, stub) -> None:
    src, dst = np.arange(40, dtype=np.uint8), np.zeros(40, dtype=np.uint8)
    cudart.copy(make_plan(src, dst), ADDRESS)
    assert dst.tolist() == [*range(8), *[0] * 24, *range(32, 40)]
    assert stub("used_stream").value == ADDRESS


def test_a_refused_copy_is_an_error_that_does_not_stay(cudart: Cudart, stub, stub_path: Path) -> None:
    stub("fails", ctypes.c_int).value = 1
    src, dst = np.arange(40, dtype=np.uint8), np.zeros(40, dtype=np.uint8)
    with pytest.raises(TransferError, match=r"cudaMemcpyAsync failed: invalid argument \(1\)"):
        cudart.copy(make_plan(src, dst), ADDRESS)
    assert not dst.any()
    assert ctypes.CDLL(str(stub_path)).peek_error() == 0


def test_host_memory_is_registered_for_all_contexts(cudart: Cudart, stub) -> None:
    cudart.host_register(ADDRESS, 2**40)
    assert stub("registered").value == ADDRESS
    assert stub("registered_bytes", ctypes.c_size_t).value == 2**40
    assert stub("flags", ctypes.c_uint).value == 1
    cudart.host_unregister(ADDRESS)
    assert stub("unregistered").value == ADDRESS


def test_memory_that_cannot_be_registered(cudart: Cudart, stub, stub_path: Path) -> None:
    stub("fails", ctypes.c_int).value = 1
    with pytest.raises(TransferError, match=r"cudaHostRegister failed: out of memory \(2\)"):
        cudart.host_register(ADDRESS, 4096)
    with pytest.raises(TransferError, match=r"cudaHostUnregister failed: invalid argument \(1\)"):
        cudart.host_unregister(ADDRESS)
    assert ctypes.CDLL(str(stub_path)).peek_error() == 0


def test_the_capture_mode_is_relaxed_in_the_calling_thread(cudart: Cudart, stub_path: Path) -> None:
    library = ctypes.CDLL(str(stub_path))
    modes: list[int] = []

    def relax() -> None:
        modes.append(library.peek_mode())
        cudart.relax_capture()
        cudart.relax_capture()
        modes.append(library.peek_mode())

    thread = threading.Thread(target=relax)
    thread.start()
    thread.join(20)
    assert modes == [0, 2]
    assert library.peek_mode() == 0


MAPS = """\
55d0c8a00000-55d0c8a01000 r--p 00000000 08:01 1312 /usr/bin/python3.11
7f10a0000000-7f10a0021000 rw-p 00000000 00:00 0
7f10b0000000-7f10b0200000 r--p 00000000 08:01 77 /opt/cuda/lib/libcudart_static.so
7f10b1000000-7f10b1200000 r-xp 00000000 08:01 78 /opt/cuda/libcudart.so/other.so
{line}
7ffd3c5e5000-7ffd3c606000 rw-p 00000000 00:00 0 [stack]
"""


@pytest.mark.parametrize(
    "path",
    [
        "/v/site-packages/nvidia/cu13/lib/libcudart.so.13",
        "/v/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12",
        "/v/torch/lib/libcudart-9335f6a2.so.12",
        "/with some/space/libcudart.so.12.8.90",
    ],
)
def test_the_library_that_is_loaded_is_found(path: str, tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(MAPS.format(line=f"7f10c0000000-7f10c00a0000 r--p 00000000 08:01 99    {path}"))
    assert find_cudart(maps) == path


def test_where_no_library_is_loaded_the_backend_says_so(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(MAPS.format(line=""))
    with pytest.raises(ConfigError, match=r"torch has loaded no libcudart\.so"):
        find_cudart(maps)
