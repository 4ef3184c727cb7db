"""What a device backend is: asynchronous copies between the engine's KV tensors and slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of the device, of all KV cache groups.

    The blocks of a group follow each other in their request. They fill chunks of
    ``blocks_per_chunk`` blocks, aligned to the start of the request: the first chunk of a group is
    entered ``first_indices[g] % blocks_per_chunk`` blocks from its start, and the last can end early.

    Attributes:
        ids: int64, shape (blocks,): the rows of the tensors, group after group.
        group_sizes: blocks of each group; they add up to ``len(ids)``.
        first_indices: index of each group's first block within its request.
    """

    ids: npt.NDArray[np.int64]
    group_sizes: tuple[int, ...]
    first_indices: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.ids.dtype != np.int64:
            raise ValueError(f"ids must be int64 of one dimension, not {self.ids.dtype} of {self.ids.ndim}")
        if len(self.first_indices) != len(self.group_sizes):
            raise ValueError(
                f"{len(self.group_sizes)} group_sizes, but {len(self.first_indices)} first_indices"
            )
        if sum(self.group_sizes) != len(self.ids):
            raise ValueError(
                f"group_sizes add up to {sum(self.group_sizes)}, but there are {len(self.ids)} ids"
            )
        if min((*self.group_sizes, *self.first_indices), default=0) < 0:
            raise ValueError("group_sizes and first_indices must not be negative")

    @staticmethod
    def make(
        ids: Sequence[int] | npt.NDArray[np.integer[Any]],
        group_sizes: Sequence[int],
        first_indices: Sequence[int],
    ) -> Blocks:
        """Make blocks from any sequences; ``ids`` of another integer type are converted."""
        return Blocks(np.asarray(ids, dtype=np.int64), tuple(group_sizes), tuple(first_indices))

    def slots_needed(self, blocks_per_chunk: int) -> tuple[int, ...]:
        """Return how many slots each group takes. A group without blocks takes none."""
        return tuple(
            -(-(size + first % blocks_per_chunk) // blocks_per_chunk) if size else 0
            for size, first in zip(self.group_sizes, self.first_indices, strict=True)
        )


@dataclass(frozen=True, slots=True)
class PageRef:
    """A tensor that a group's blocks have pages in.

    Attributes:
        tensor: its index in ``KVCaches.tensors``.
        page_bytes: bytes of the page that the group uses, padding not counted. Only they are copied.
    """

    tensor: int
    page_bytes: int


@dataclass(frozen=True, eq=False)
class KVCaches:
    """The engine's KV cache as tensors of pages.

    Attributes:
        tensors: int8, each of shape (num_blocks, page_bytes); a row's bytes are contiguous, rows
            can be further apart than ``page_bytes``.
        groups: for each KV cache group, the tensors that its blocks have pages in.
    """

    tensors: tuple[torch.Tensor, ...]
    groups: tuple[tuple[PageRef, ...], ...]

    def __post_init__(self) -> None:
        for index, tensor in enumerate(self.tensors):
            if tensor.ndim != 2 or tensor.dtype != torch.int8 or tensor.stride(1) != 1:
                raise ValueError(
                    f"tensor {index} is not int8 of shape (num_blocks, page_bytes) with contiguous rows"
                )
        for ref in (ref for group in self.groups for ref in group):
            if not 0 <= ref.tensor < len(self.tensors):
                raise ValueError(f"a group refers to tensor {ref.tensor} of {len(self.tensors)}")
            if not 0 < ref.page_bytes <= self.tensors[ref.tensor].shape[1]:
                raise ValueError(
                    f"a group uses {ref.page_bytes} bytes of a page of tensor {ref.tensor}, which "
                    f"has {self.tensors[ref.tensor].shape[1]}"
                )

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Bytes of one block in each tensor, as ``SlotLayout.make`` takes them."""
        return tuple(int(tensor.shape[1]) for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Finished:
    """How a transfer ended.

    Attributes:
        transfer_id: as submitted.
        nbytes: bytes of its pages.
        seconds: how long the copy took, waiting for its turn not counted.
        error: why it failed, twice; None where it succeeded.
    """

    transfer_id: int
    nbytes: int
    seconds: float
    error: BaseException | None = None


class TransferEngine(ABC):
    """Copies blocks to slots and back, beside the engine's work.

    Stores happen in the order of their submission, and so do loads; a store and a load have no
    order between them, and an expedited load does not wait for other loads. Whoever submits sees
    to it that nobody else writes to the blocks and slots concerned until the transfer has ended.

    A copy that fails is repeated once, then reported with its error; nothing is raised from the
    copying threads. Submissions come from one thread; the rest can be called from any.
    """

    @abstractmethod
    def submit_store(self, transfer_id: int, blocks: Blocks, slots: Sequence[int]) -> None:
        """Copy ``blocks`` to ``slots``, after what the caller has given the device to do so far.

        Args:
            transfer_id: names the transfer; not the id of one that is under way.
            blocks: what to copy.
            slots: as many as ``Blocks.slots_needed`` adds up to, group after group.

        Raises:
            ValueError: the number of slots does not fit, or an id, block or slot is out of range.
            StateError: the engine is closed.
        """

    @abstractmethod
    def submit_load(
        self, transfer_id: int, slots: Sequence[int], blocks: Blocks, *, expedited: bool = False
    ) -> None:
        """Copy ``slots`` to ``blocks``. Arguments and errors as in ``submit_store``.

        Args:
            expedited: do not wait for loads that were submitted before.
        """

    @abstractmethod
    def finished(self) -> list[Finished]:
        """Return the transfers that ended since the last call, in the order of their ends."""

    @abstractmethod
    def wait(self, transfer_ids: Iterable[int]) -> None:
        """Block until these have ended. Ids that are unknown or ended are no error.

        The results stay where ``finished`` finds them.
        """

    @abstractmethod
    def drain(self) -> None:
        """Block until every transfer submitted so far has ended."""

    @abstractmethod
    def set_wakeup(self, wakeup: Callable[[], object] | None) -> None:
        """Have ``wakeup`` called from a copying thread whenever ``finished`` has something new.

        It must not block: an event loop's owner passes a ``call_soon_threadsafe``.
        """

    @abstractmethod
    def close(self) -> None:
        """Drain, then stop. May be called again; ``finished`` and ``wait`` go on working."""
