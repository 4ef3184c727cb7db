"""A simulated network: asyncio's connections between hosts that are distant, cut off, or dead.

Programs use asyncio's streams unchanged. ``OWNER`` determines the owner of a connection or server.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from random import Random

from kvtier_testing.sim.loop import OWNER, ProcessId, SimLoop

Address = tuple[str, int]
MakeProtocol = Callable[[], asyncio.BaseProtocol]


@dataclass(frozen=True)
class LinkFault:
    """A fault of all links between two groups of hosts, for a while.

    Attributes:
        delay_s: added delay; infinite to hold messages until the fault ends.
        reads: whether it hits reads of memory as well as messages.
    """

    begin_s: float
    end_s: float
    left: frozenset[str]
    right: frozenset[str]
    delay_s: float
    reads: bool

    def hits(self, one: str, other: str, now_s: float, *, reads: bool) -> bool:
        """Return whether it delays traffic from one host to the other now."""
        is_between = (one in self.left and other in self.right) or (other in self.left and one in self.right)
        return is_between and self.begin_s <= now_s < self.end_s and (self.reads or not reads)


class Network:
    """The network between hosts.

    Args:
        latency_s: longest latency without a fault.
        faults: link faults of the whole run.

    Attributes:
        dead: killed processes, whose messages no longer arrive.
        connections: number of connections made.
        messages: number of calls of ``write`` on connections.
    """

    def __init__(self, loop: SimLoop, chance: Random, latency_s: float, faults: Sequence[LinkFault]) -> None:
        self.loop = loop
        self.chance = chance
        self.dead: set[ProcessId] = set()
        self.connections = 0
        self.messages = 0
        self._latency_s = latency_s
        self._faults = faults
        self._listeners: dict[Address, Listener] = {}
        self._ends: dict[ProcessId, dict[_End, None]] = {}

    def send(
        self,
        one: str,
        other: str,
        arrive: Callable[[], object],
        *,
        reads: bool = False,
        takes_s: float = 0.0,
    ) -> None:
        """Call ``arrive`` when traffic sent now from one host reaches the other."""

        def attempt() -> None:
            cut = [fault.end_s for fault in self._hitting(one, other, reads) if fault.delay_s == math.inf]
            if cut:
                self.loop.call_at(max(cut) + self.chance.random() * self._latency_s, attempt)
            else:
                arrive()

        slow_s = sum(it.delay_s for it in self._hitting(one, other, reads) if it.delay_s < math.inf)
        self.loop.call_later(self.chance.random() * self._latency_s + slow_s + takes_s, attempt)

    def _hitting(self, one: str, other: str, reads: bool) -> Iterator[LinkFault]:
        now_s = self.loop.time()
        return (fault for fault in self._faults if fault.hits(one, other, now_s, reads=reads))

    def kill(self, owner: ProcessId) -> None:
        """Kill a process: reset its connections and close its listeners."""
        self.dead.add(owner)
        for address, listener in list(self._listeners.items()):
            if listener.owner == owner:
                del self._listeners[address]
        for end in list(self._ends.get(owner, ())):
            end.reset()

    def listen(self, make: MakeProtocol, address: Address) -> Listener:
        """Accept connections at an address."""
        owner = _owner()
        if address in self._listeners or owner in self.dead:
            raise OSError(f"{address} is in use")
        self._listeners[address] = listener = Listener(self, make, address, owner)
        return listener

    async def connect(self, make: MakeProtocol, address: Address) -> tuple[_End, asyncio.BaseProtocol]:
        """Connect to an address. While the network is cut, this waits."""
        owner, arrived = _owner(), self.loop.create_future()
        self.send(owner[0], address[0], partial(_set, arrived))
        await arrived
        listener = self._listeners.get(address)
        if listener is None or owner in self.dead:
            raise ConnectionRefusedError(f"no server listens at {address}")
        self.connections += 1
        near, far = (
            _End(self, owner, address, make()),
            _End(self, listener.owner, (owner[0], 0), listener.make()),
        )
        near.other, far.other = far, near
        for end in (near, far):
            self._ends.setdefault(end.owner, {})[end] = None
        listener.context.copy().run(far.protocol.connection_made, far)
        near.protocol.connection_made(near)
        return near, near.protocol

    def forget(self, listener_or_end: Listener | _End) -> None:
        """Forget a closed listener or connection."""
        it = listener_or_end
        if isinstance(it, _End):
            self._ends[it.owner].pop(it, None)
        elif self._listeners.get(it.address) is it:
            del self._listeners[it.address]


class Listener:
    """A server that is also its own socket, limited to the parts of asyncio in use."""

    def __init__(self, network: Network, make: MakeProtocol, address: Address, owner: ProcessId) -> None:
        self.make = make
        self.address = address
        self.owner = owner
        self.context = copy_context()
        self.sockets = [self]
        self._network = network

    def getsockname(self) -> Address:
        """Return its address."""
        return self.address

    def close(self) -> None:
        """Accept no more connections."""
        self._network.forget(self)


class _End(asyncio.Transport):
    """One end of a connection that is also its own socket, limited to the parts of asyncio in use."""

    other: _End

    def __init__(
        self, network: Network, owner: ProcessId, peer: Address, protocol: asyncio.BaseProtocol
    ) -> None:
        super().__init__({"socket": self, "peername": peer})
        assert isinstance(protocol, asyncio.Protocol)
        self.owner = owner
        self.protocol = protocol
        self._network = network
        self._is_closed = False
        self._sent: deque[bytes | Exception | None] = deque()  # but not arrived; None ends the stream

    def setsockopt(self, *_: object) -> None:
        """Do nothing."""

    def is_closing(self) -> bool:
        return self._is_closed

    def get_write_buffer_size(self) -> int:
        return 0  # the kernel takes everything

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_closed:
            self._network.messages += 1
            self._send(bytes(data))

    def close(self) -> None:
        if not self._is_closed:
            self._send(None)
            self._lose(None)

    def reset(self) -> None:
        """Reset the connection, because its process died."""
        self._is_closed = True
        self._network.forget(self)
        self._send(ConnectionResetError("connection reset by peer"))

    def _send(self, item: bytes | Exception | None) -> None:
        self._sent.append(item)
        if len(self._sent) == 1:
            self._network.send(self.owner[0], self.other.owner[0], self._arrive)

    def _arrive(self) -> None:
        """Deliver the oldest item to the other end, so that the order is kept."""
        self.other._receive(self._sent.popleft())
        if self._sent:
            self._network.send(self.owner[0], self.other.owner[0], self._arrive)

    def _receive(self, item: bytes | Exception | None) -> None:
        if self._is_closed:
            return
        if isinstance(item, bytes):
            self.protocol.data_received(item)
        elif item is None:
            if not self.protocol.eof_received():
                self.close()
        else:
            self._lose(item)

    def _lose(self, error: Exception | None) -> None:
        self._is_closed = True
        self._network.forget(self)
        self._network.loop.call_soon(self.protocol.connection_lost, error)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _owner() -> ProcessId:
    owner = OWNER.get()
    assert owner is not None, "only simulated processes can use the simulated network"
    return owner
