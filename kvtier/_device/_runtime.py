"""The device interface of a transfer engine: streams, events and pinned memory."""

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

    def query(self) -> bool:
        """Return whether the work before it is done."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the milliseconds to a later event of ``record``; both are over."""


class Stream(ABC):
    """Work of the device that runs in the order of its submission. Errors are raised."""

    @abstractmethod
    def wait(self, event: Any) -> None:
        """Make later work wait for ``event``."""

    @abstractmethod
    def record(self) -> Event:
        """Return an event after all work enqueued so far."""

    @abstractmethod
    def copy(self, plan: CopyPlan) -> None:
        """Enqueue all copies of ``plan``; if it raises, the first few are enqueued.

        The caller keeps the plan until they have ended. May block while the device's queue is full.
        """

    def start_transfer(self, after: Any, plan: CopyPlan) -> tuple[Event, Event]:
        """Enqueue the copies of ``plan`` behind the event ``after``; return their start and end.

        None is in flight when it raises. Otherwise as ``copy``.
        """
        self.wait(after)
        start = self.record()
        try:
            self.copy(plan)
            return start, self.record()
        except BaseException:
            self.record().synchronize()  # If a copy is refused, earlier copies are still in flight.
            raise


class Runtime(ABC):
    """One device. Errors are raised."""

    transfers_at_once: int = 2
    """Transfers that a queue starts before the first of them has ended. With two, the device continues with
    the next one while the host learns of the last one's end."""

    starts_with_copies: bool = False
    """Whether ``start_transfer`` returns after the copies."""

    can_pin: bool = True
    """Whether it can pin host memory that the device's library has not allocated."""

    def attach(self) -> None:  # noqa: B027
        """Prepare the calling thread for the calls below. May be called again."""

    @abstractmethod
    def record_compute(self) -> Event:
        """Return an event after the calling thread's enqueued work; needs no ``attach``."""

    def node(self) -> int | None:
        """Return the device's NUMA node, or None if it is unknown; needs no ``attach``."""
        return None

    @abstractmethod
    def open_stream(self, queue: CopyQueue, *, plain: bool = False) -> Stream:
        """Return a new stream for a queue; needs no ``attach``.

        A plain stream copies one by one, in case another method has failed.
        """

    def host_register(self, address: int, nbytes: int) -> None:  # noqa: ARG002
        """Pin host memory, so that the device accesses it directly."""
        raise TransferError("memory cannot be pinned for this device")

    def host_unregister(self, address: int) -> None:  # noqa: ARG002
        """Undo ``host_register``."""
        raise TransferError("no memory was pinned")
