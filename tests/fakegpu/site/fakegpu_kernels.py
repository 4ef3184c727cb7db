"""The kernels of torch, Triton and vLLM, computed on the CPU over the fake GPU's memory.

A kernel computes when it is launched, after all earlier work of its stream. The runtime library
(``streams.h``) hides the results of late kernels from other streams until the order permits access.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch

_runtime = ctypes.CDLL("libcudart.so.13")
_runtime.fakegpu_done.restype = _runtime.fakegpu_issued.restype = ctypes.c_uint64
_libraries: list[torch.library.Library] = []  # an implementation lives as long as its library

_NATIVE = (
    *(
        "empty",
        "as_strided",
        "view",
        "_reshape_alias",
        "resize_",
        "set_",
        "record_stream",
        "_local_scalar_dense",
    ),
    *("is_pinned", "_pin_memory", "unfold", "_to_copy", "_copy_from", "_efficientzerotensor", "is_set_to"),
    *(
        "_nested",
        "_fused",
        "_foreach",
        "_cudnn",
        "cudnn",
        "_use_cudnn",
        "miopen",
        "_conj",
        "_neg_view",
        "lift",
    ),
    "_chunk_cat",
)
"""Operations, by prefix, that launch no kernel, or that inference does not use."""

_LATE = ("fill_", "zero_")
"""Operations whose results other streams see late. Copies on the device and KV cache writes are late, too."""


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes behind a tensor of the fake GPU, as a tensor of the CPU."""
    storage = tensor.untyped_storage()
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the CPU over the memory of one of the fake GPU."""
    storage = tensor.untyped_storage()
    if not storage.nbytes() or not storage.data_ptr():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    found = torch.empty(0, dtype=tensor.dtype)
    with torch.no_grad():
        found.set_(
            memory_of(tensor).untyped_storage(),
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
        )
    return found


def to_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new tensor of the fake GPU with the content of a CPU tensor."""
    found = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cuda")
    if tensor.numel():
        alias(found).copy_(tensor)
    return found


def pieces(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield address and length of each contiguous piece of a tensor."""
    sizes, strides = list(tensor.size()), list(tensor.stride())
    length = tensor.element_size()
    while sizes and strides[-1] * tensor.element_size() == length:
        length *= sizes.pop()
        strides.pop()
    for index in itertools.product(*map(range, sizes)):
        offset = sum(i * stride for i, stride in zip(index, strides, strict=True))
        yield tensor.data_ptr() + offset * tensor.element_size(), length


def current_stream() -> int:
    """Return the handle of this thread's stream."""
    return int(torch._C._cuda_getCurrentRawStream(0))


def launch(late: Iterable[tuple[int, int]] = ()) -> None:
    """Run all earlier work of the current stream; writes to the pieces of memory in ``late`` show up late."""
    if _graphs.captured is not None:
        return
    ranges = [number for piece in late if piece[1] for number in piece]
    array = (ctypes.c_size_t * len(ranges))(*ranges)
    _runtime.fakegpu_launch(ctypes.c_void_p(current_stream()), array, ctypes.c_size_t(len(ranges) // 2))


# --- graphs ---

Kernel = Callable[..., Any]


class Graphs:
    """Records the kernels that a thread launches while it captures a graph, and replays them.

    The graph keeps their tensors. A kernel computes during its capture, because the next one may read its
    results; the end of the capture undoes that. ``runtime.c`` has the rules of capturing.
    """

    def __init__(self) -> None:
        self._thread = threading.local()  # ``captured`` and ``undo`` of the graph under capture
        self._kernels = weakref.WeakKeyDictionary[Any, list[Callable[[], None]]]()

    @property
    def captured(self) -> list[Callable[[], None]] | None:
        """The kernels of the graph that this thread captures; None outside a capture."""
        return getattr(self._thread, "captured", None)

    def recorded(self, kernel: Kernel) -> Kernel:
        """Return the kernel in a wrapper that records its launches."""

        def launched(*args: Any, **kwargs: Any) -> Any:
            if self.captured is None:
                return kernel(*args, **kwargs)
            for it in (*args, *kwargs.values()):
                if isinstance(it, torch.Tensor) and it.is_cuda and it.untyped_storage().nbytes():
                    memory = memory_of(it)
                    self._thread.undo.setdefault(memory.data_ptr(), (memory, memory.clone()))
            result = kernel(*args, **kwargs)
            self.captured.append(lambda: self._rewrite(result, kernel(*args, **kwargs)))
            return result

        return launched

    def _rewrite(self, result: Any, again: Any) -> None:
        """Write a later launch's result to the memory of the first one's."""
        if isinstance(result, (list, tuple)):
            for pair in zip(result, again, strict=True):
                self._rewrite(*pair)
        elif isinstance(result, torch.Tensor) and result.data_ptr() != again.data_ptr():
            alias(result).copy_(alias(again))

    def use(self, of: Any) -> None:
        """Make torch's graph class replay the recorded kernels."""
        begin, end, replay = of.capture_begin, of.capture_end, of.replay

        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
            begin(graph, *args, **kwargs)
            self._thread.captured = self._kernels[graph] = []
            self._thread.undo = {}

        def capture_end(graph: Any) -> None:
            self._thread.captured = None
            for memory, before in self._thread.undo.values():
                memory.copy_(before)
            end(graph)

        def launch_all(graph: Any) -> None:
            replay(graph)
            for kernel in self._kernels[graph]:
                kernel()

        of.capture_begin, of.capture_end, of.replay = capture_begin, capture_end, launch_all


_graphs = Graphs()


# --- torch ---


class Copies:
    """Copies between host and device, enqueued on streams. Pinned memory lives until its copies are done."""

    def __init__(self) -> None:
        self._pending: deque[tuple[ctypes.c_void_p, int, torch.Tensor]] = deque()

    def copy(self, dst: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Do what ``dst.copy_(src)`` does."""
        source = src.expand(dst.size())
        if dst.device == src.device:
            launch(pieces(dst))
            alias(dst).copy_(alias(source))
        elif self._is_plain(dst, source):
            self._enqueue(dst, source, non_blocking)
        else:  # it needs a conversion; torch also waits here, unless the copy is to the device
            launch()
            if not (non_blocking and dst.is_cuda):
                torch.cuda.current_stream().synchronize()
            (alias(dst) if dst.is_cuda else dst).copy_(alias(source) if source.is_cuda else source)
        return dst

    @staticmethod
    def _is_plain(dst: torch.Tensor, src: torch.Tensor) -> bool:
        return all((dst.dtype == src.dtype, dst.is_contiguous(), src.is_contiguous()))

    def _enqueue(self, dst: torch.Tensor, src: torch.Tensor, non_blocking: bool) -> None:
        stream = ctypes.c_void_p(current_stream())
        addresses = ctypes.c_void_p(dst.data_ptr()), ctypes.c_void_p(src.data_ptr())
        _runtime.cudaMemcpyAsync(*addresses, ctypes.c_size_t(dst.nbytes), 4, stream)
        if not non_blocking:
            torch.cuda.current_stream().synchronize()
            return
        self._pending.append((stream, _runtime.fakegpu_issued(stream), src if dst.is_cuda else dst))
        while self._pending:
            oldest, number, _ = self._pending[0]
            if _runtime.fakegpu_done(oldest) < number:
                break
            self._pending.popleft()


class OnCpu:
    """An operation of the GPU, computed by its CPU counterpart."""

    def __init__(self, operation: Any, name: str) -> None:
        self._operation = operation
        self._is_late = name.partition(".")[0] in _LATE

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        launch(pieces(args[0]) if self._is_late else ())
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        on_cpu = [self._to_cpu(it, seen) for it in args]
        named = {name: self._to_cpu(it, seen) for name, it in kwargs.items()}
        if named.get("pin_memory"):
            named["pin_memory"] = None
        return self._back(self._operation(*on_cpu, **named), seen)

    def _to_cpu(self, it: Any, seen: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        match it:
            case torch.Tensor() if it.is_cuda:
                seen.append((alias(it), it))
                return seen[-1][0]
            case torch.Size():
                return it
            case list() | tuple():
                return type(it)(self._to_cpu(one, seen) for one in it)
            case torch.device(type="cuda"):
                return torch.device("cpu")
            case torch.Generator():
                return None
        return it

    def _back(self, it: Any, seen: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Return results as tensors of the GPU: the arguments, views of them, or new ones."""
        if isinstance(it, (list, tuple)):
            return type(it)(self._back(one, seen) for one in it)
        if not isinstance(it, torch.Tensor):
            return it
        for on_cpu, given in seen:
            if it is on_cpu and it.size() != given.size():  # a resized output
                given.resize_(it.size())
                alias(given).copy_(it)
                return given
            if it is on_cpu:
                return given
            storages = it.untyped_storage().data_ptr(), on_cpu.untyped_storage().data_ptr()
            if it.numel() and storages[0] == storages[1] and it.dtype == given.dtype:
                return torch.as_strided(given, it.size(), it.stride(), it.storage_offset())
        return to_gpu(it)


def replace(library: torch.library.Library, name: str, kernel: Callable[..., Any]) -> None:
    """Replace a CUDA operation by a function."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about the replacement
        library.impl(name, _graphs.recorded(kernel), "CUDA", allow_override=True)


def use_torch(module: ModuleType) -> None:
    """Replace torch's operations for CUDA."""
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    for full in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        namespace, _, name = full.partition("::")
        base, _, overload = name.partition(".")
        if namespace != "aten" or base.startswith(_NATIVE) or base == "copy_":
            continue
        with suppress(AttributeError, RuntimeError):  # nothing uses an operation that Python cannot reach
            operation = getattr(getattr(torch.ops.aten, base), overload or "default")
            replace(library, name, OnCpu(operation, name))
    replace(library, "copy_", Copies().copy)
    _graphs.use(torch.cuda.CUDAGraph)


# --- Triton ---


def use_interpreter(module: Any) -> None:
    """Let Triton's interpreter work in the GPU's memory. One kernel at a time, because it patches its
    language."""
    executor = module.GridExecutor
    call, lock = executor.__call__, threading.RLock()

    def argument(it: Any) -> Any:
        if isinstance(it, tuple):
            return module._tuple_create(it, map(argument, it))
        if isinstance(it, module.TensorDescriptor):
            rest = it.shape, it.strides, it.block_shape, it.padding
            return module.TensorDescriptor(argument(it.base), *rest)
        if not hasattr(it, "data_ptr") or not (tensor := module._unwrap_tensor(it)).is_cuda:
            return it
        return module._rewrap_tensor(alias(tensor), original_tensor=it)

    def one_at_a_time(self: Any, *args: Any, **kwargs: Any) -> Any:
        launch()
        with lock:
            return call(self, *args, **kwargs)

    def arguments(self: Any, args: Any, kwargs: Any) -> Any:
        return [argument(it) for it in args], {name: argument(it) for name, it in kwargs.items()}

    def set_attribute(self: Any, target: Any, name: str, value: Any) -> None:
        if name == "__index__":  # Triton 3.6's own version needs numpy before 2.5
            value = lambda tensor: int(tensor.handle.data.item())  # noqa: E731
        set_as_before(self, target, name, value)

    scope = module._LangPatchScope
    set_as_before, scope.set_attr = scope.set_attr, set_attribute
    executor.__call__ = _graphs.recorded(one_at_a_time)
    executor._init_args_hst = arguments
    executor._restore_args_dev = lambda *_: None


# --- vLLM ---


def implement(namespace: str, name: str, kernel: Callable[..., Any]) -> None:
    """Replace an operation of vLLM's libraries."""
    library = torch.library.Library(namespace, "IMPL")
    _libraries.append(library)
    replace(library, name, kernel)


def _normalize(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    wide = x.float()
    normal = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)
    return normal if weight is None else normal * alias(weight)


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    launch()
    alias(out).copy_(_normalize(alias(x), weight, epsilon))


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> None:
    launch()
    total = alias(residual)
    total.copy_((alias(x).float() + total.float()).to(total.dtype))
    alias(x).copy_(_normalize(total, weight, epsilon))


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    launch()
    gate, up = alias(x).chunk(2, -1)
    alias(out).copy_(torch.nn.functional.silu(gate.float()).to(gate.dtype) * up)


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    table: torch.Tensor,
    is_neox: bool,
    *_: Any,
) -> None:
    """Rotate in halves, as Llama does."""
    assert is_neox
    launch()
    cos, sin = alias(table)[alias(positions).flatten()].float()[:, None].chunk(2, -1)
    for tensor in (query, key):
        if tensor is None:
            continue
        heads = alias(tensor)
        if heads.shape[-1] != head_size:
            heads = heads.unflatten(-1, (-1, head_size))
        rotated = heads[..., : 2 * cos.shape[-1]]
        first, second = rotated.float().chunk(2, -1)
        rotated.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    *_: Any,
) -> None:
    launch()  # for the slots
    at, block_size = alias(slots), keys.shape[1]
    is_used = at >= 0
    places = at[is_used].tolist()
    launch(
        piece
        for cache in (keys, values)
        for place in places
        for piece in pieces(cache[place // block_size, place % block_size])
    )
    for new, cache in ((key, keys), (value, values)):
        used = alias(new)[: len(at)][is_used]
        alias(cache)[at[is_used] // block_size, at[is_used] % block_size] = used.to(cache.dtype)


def flash_attention(q: Any, k: Any, v: Any, *rest: Any) -> list[torch.Tensor]:
    """Compute FlashAttention 3's ``fwd`` over a paged cache; the other arguments are known by position."""
    out, first_tokens, lengths, table = rest[3], rest[4], rest[8], rest[11]
    scale, causal, window = rest[20:23]
    launch()
    result = out if out is not None else torch.empty_like(q)
    queries, keys, values, into = alias(q), alias(k), alias(v), alias(result)
    starts, heads_each = alias(first_tokens).tolist(), q.shape[1] // k.shape[2]
    for row, length in enumerate(alias(lengths).tolist()[: len(starts) - 1]):
        tokens = slice(starts[row], starts[row + 1])
        count = tokens.stop - tokens.start
        if not count or not length:
            continue
        blocks = alias(table)[row, : -(-length // k.shape[1])].long()
        both = [
            cache[blocks].flatten(0, 1)[:length].float().repeat_interleave(heads_each, 1).transpose(0, 1)
            for cache in (keys, values)
        ]
        distance = torch.arange(count)[:, None] + length - count - torch.arange(length)[None]
        mask = (distance >= 0) & ((distance <= window) | (window < 0)) if causal else None
        found = torch.nn.functional.scaled_dot_product_attention(
            queries[tokens].float().transpose(0, 1), *both, attn_mask=mask, scale=scale
        )
        into[tokens] = found.transpose(0, 1).to(into.dtype)
    return [result, *(torch.empty(0, device="cuda") for _ in range(3))]


def use_vllm(module: ModuleType) -> None:
    """Replace the operations that a Llama model of vLLM calls."""
    for kernel in (rms_norm, fused_add_rms_norm, silu_and_mul, rotary_embedding):
        implement("_C", kernel.__name__, kernel)
    implement("_C_cache_ops", "reshape_and_cache_flash", reshape_and_cache_flash)


def use_loaded_libraries(module: Any) -> None:
    """Make vLLM's sleep call the fake GPU's runtime: torchvision loads another one."""
    find = module.find_loaded_library
    module.find_loaded_library = lambda name: "libcudart.so.13" if name == "libcudart" else find(name)


def use_flash_attention(module: ModuleType) -> None:
    """Replace FlashAttention 3."""
    implement("_vllm_fa3_C", "fwd", flash_attention)
    schedule = lambda *_: torch.zeros(1, dtype=torch.int32, device="cuda")  # noqa: E731
    implement("_vllm_fa3_C", "get_scheduler_metadata", schedule)


def use_sampler(module: Any) -> None:
    """Leave the logits unchanged: the tests decode greedily."""
    module.apply_top_k_top_p_triton = lambda logits, k, p, **_: logits
