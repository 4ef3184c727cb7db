"""What a transfer engine needs from a device: streams, events and pinned memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

from kvtier._device.base import CopyQueue
from kvtier._device.plan import CopyPlan
from kvtier.errors import TransferError


class Event(Protocol):
    """A place in the work of a stream."""

    def synchronize(self) -> None:
        """Block until the work before it is done, with the interpreter lock released."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the milliseconds from this event to a later one of a stream's ``record``; both are over."""


class Stream(Protocol):
    """Work of the device that happens in the order in which it was enqueued. Errors are raised."""

    def wait(self, event: Any) -> None:
        """Make what is enqueued from now on wait for ``event``."""

    def record(self) -> Event:
        """Return an event after all that was enqueued so far."""

    def copy(self, plan: CopyPlan) -> None:
        """Enqueue the copies of ``plan``, all or, when it raises, the first few.

        The caller keeps the plan until they are over. May block while the device cannot take more.
        """


class Runtime(ABC):
    """One device. Errors are raised."""

    transfers_at_once: int = 2
    """Transfers that a queue begins before the first of them has ended.

    With two, the device continues with the next one while the host learns that the last has ended.
    """

    can_pin: bool = True
    """Whether host memory can be pinned that the device's library has not allocated."""

    def attach(self) -> None:  # noqa: B027
        """Prepare the calling thread for the calls below. May be called again."""

    @abstractmethod
    def record_compute(self) -> Event:
        """Return an event after what the calling thread has enqueued; needs no ``attach``."""

    def node(self) -> int | None:
        """Return the NUMA node that the device is at, where that is known; needs no ``attach``."""
        return None

    @abstractmethod
    def open_stream(self, queue: CopyQueue, *, plain: bool = False) -> Stream:
        """Return a new stream for a queue; needs no ``attach``.

        A plain one copies one by one, because another way may be what has failed.
        """

    def host_register(self, address: int, nbytes: int) -> None:  # noqa: ARG002
        """Pin host memory, so that the device copies from it and to it directly."""
        raise TransferError("memory cannot be pinned for this device")

    def host_unregister(self, address: int) -> None:  # noqa: ARG002
        """Undo ``host_register``."""
        raise TransferError("no memory was pinned")
