"""The client side of the control channel: connections to peers, maintained in the background.

Lookups use only the connected peers. A peer that cannot be reached or does not answer costs at most
``answer_timeout_s`` once: it is dropped and reconnected in the background. A lookup does not wait for a late
peer if others have answered. A late peer gets no further lookup until its answer has arrived.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import anyio

from kvtier.keys import OffloadKey
from kvtier_nixl import _protocol as protocol
from kvtier_nixl._agent import Agent, ReadError
from kvtier_nixl._pace import Pace, share_out
from kvtier_nixl._protocol import Challenge, Message, MessageT, PeerHello, PeerProtocolError, Welcome
from kvtier_nixl._server import Facts
from kvtier_nixl.config import parse_address

_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0
_LONGEST_PENALTY_S: Final = 60.0
"""Pause after many failed reads. A peer whose control channel alone works, as behind a firewall, must not
take all receiving memory: a read that hangs keeps its part for minutes."""

_FIRST_TRIES_S: Final = 5.0
_PATIENCE: Final = 0.1
"""Fraction of ``answer_timeout_s`` to wait for late peers once half of them have answered."""

_ASK_ALL_EVERY_S: Final = 1.0
"""Seconds between two questions to all peers about a key whose holders a client has named."""

_MOST_ASKED: Final = 65_536
_LEASE_SHARE: Final = 0.99  # Fraction of a lease that is relied on, because clocks differ.


class PeerError(Exception):
    """A peer cannot be used now; the text says why."""


@dataclass(eq=False)
class _Link:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    welcome: Welcome
    asked_s: float = 0.0  # time of the last request


@dataclass(frozen=True, slots=True)
class Lease:
    """Chunks that a peer keeps in place until they have been read.

    Attributes:
        addresses, trailers: see ``protocol.Leased``.
    """

    addresses: Sequence[int]
    trailers: Sequence[bytes]
    _number: int
    _until_s: float
    _link: _Link


class Peer:
    """Another engine, at one address.

    Args:
        address: where it listens.
        facts: the facts that both sides must agree on.
        agent: this engine's agent.
        timeout_s: seconds after which an answer is late.
        warn: called with a subject for log limits and a text when the peer cannot be used.

    Attributes:
        was_tried: set after the first attempt to connect has ended.
        pace: speed of reads from it.
        is_late: whether the answer to an abandoned lookup is still missing.
    """

    def __init__(
        self, address: str, facts: Facts, agent: Agent, timeout_s: float, warn: Callable[[str, str], None]
    ) -> None:
        self.address = address
        self._facts = facts
        self._agent = agent
        self._timeout_s = timeout_s
        self._warn = warn
        self._link: _Link | None = None
        self._turn = asyncio.Lock()  # anyio's lock yields to other tasks even if it is free
        self._is_lost = asyncio.Event()
        self.was_tried = asyncio.Event()
        self.pace = Pace()
        self.is_late = False
        self._is_self = False
        self._penalty_s = 0.0  # pause before a reconnect after failed reads

    async def keep_connected(self) -> None:
        """Connect, and connect again whenever the connection is lost, until this task is cancelled."""
        pause_s = _FIRST_PAUSE_S
        try:
            while True:
                self._is_lost.clear()
                try:
                    async with asyncio.timeout(self._timeout_s):
                        await self._connect()
                except Exception as error:  # also errors of NIXL on the peer's metadata
                    self._warn(
                        f"connection {self.address}", f"peer {self.address} is not used: {_words(error)}"
                    )
                self.was_tried.set()
                if self._is_self:
                    return
                if self._link is not None:
                    pause_s = _FIRST_PAUSE_S
                    await self._is_lost.wait()
                await anyio.sleep(max(pause_s, self._penalty_s))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            self.was_tried.set()
            self.close()

    @property
    def can_be_asked(self) -> bool:
        """Whether it is connected and has answered all lookups."""
        return self.is_connected and not self.is_late

    @property
    def is_connected(self) -> bool:
        """Whether its connection is open on both sides."""
        link = self._link
        return link is not None and not link.reader.at_eof() and not link.writer.is_closing()

    def drop_if_closed(self) -> None:
        """Drop a connection that the peer has closed or reset."""
        if not self.is_connected:
            self.drop("it has closed the connection")

    async def lookup(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return whether the peer holds each key. Raises PeerError."""
        held: list[bool] = []
        for part in _pieces(keys):
            found = await self._ask(protocol.LookupKeys(part), protocol.Found)
            if len(found.held) != len(part):
                raise self._broken("it answered for another number of keys")
            held += found.held
        return held

    async def lease(self, keys: Sequence[OffloadKey]) -> Lease:
        """Lease chunks, at most ``MAX_KEYS``. Raises PeerError."""
        leased = await self._ask(protocol.LeaseChunks(tuple(keys)), protocol.Leased)
        if not len(leased.addresses) == len(leased.trailers) == len(keys):
            raise self._broken("it answered for another number of keys")
        link = self._link
        if link is None:
            raise PeerError("it is not connected")
        until_s = link.asked_s + _LEASE_SHARE * leased.lasts_s
        return Lease(leased.addresses, leased.trailers, leased.lease, until_s, link)

    def release(self, lease: Lease) -> bool:
        """End a lease; return whether it was valid until now.

        Raises:
            PeerError: the lease belongs to an earlier connection, because the peer was reset or restarted.
        """
        self.drop_if_closed()
        if self._link is not lease._link:
            raise PeerError("it has closed the connection")
        lease._link.writer.write(protocol.encode(protocol.Release(lease._number)))
        return time.monotonic() < lease._until_s

    async def read(self, addresses: Sequence[int], rows: Sequence[int]) -> None:
        """Read chunks into rows of the receiving memory. See ``Agent.read``.

        If the read fails or is cancelled, for example at the deadline, the peer is dropped and reconnected
        later.
        """
        link = self._link
        if link is None:
            self._agent.free_rows(rows)
            raise PeerError("it is not connected")
        try:
            with self.pace.reading(len(rows)):
                await self._agent.read(link.welcome.agent, addresses, rows)
        except BaseException as error:
            if self._link is link:  # otherwise another read on this connection has failed
                self._penalty_s = min(max(_FIRST_PAUSE_S, 2 * self._penalty_s), _LONGEST_PENALTY_S)
                self.drop(str(error) if isinstance(error, ReadError) else "a read took too long")
            raise
        self._penalty_s = 0.0

    def drop(self, why: str) -> None:
        """Stop using the peer until it is reconnected."""
        if self._link is not None:
            self._warn(f"connection {self.address}", f"peer {self.address} dropped: {why}; connecting again")
            self.close()

    async def _ask(self, request: Message, wanted: type[MessageT]) -> MessageT:
        link: _Link | None = None
        try:
            async with asyncio.timeout(self._timeout_s):  # This includes the wait for earlier requests.
                async with self._turn:
                    self.drop_if_closed()
                    link = self._link
                    if link is None:
                        raise PeerError("it is not connected")
                    link.asked_s = time.monotonic()
                    link.writer.write(protocol.encode(request))
                    await link.writer.drain()
                    return await protocol.expect(link.reader, wanted, protocol.MAX_FRAME_BYTES)
        except (PeerProtocolError, OSError, TimeoutError) as error:
            # The peer is not at fault if its queue is long; the request at the head of the queue drops it.
            if link is None:
                raise PeerError("earlier requests to it take too long") from None
            raise self._broken(_words(error)) from None
        except BaseException:  # After a cancellation, the next request would receive this answer.
            if link is not None and self._link is link:
                self.close()
            raise

    def _broken(self, why: str) -> PeerError:
        self.drop(why)
        return PeerError(why)

    def close(self) -> None:
        """Close the connection, if there is one."""
        link, self._link = self._link, None
        if link is not None:
            link.writer.close()
            self._agent.forget(link.welcome.agent)
        self._is_lost.set()

    async def _connect(self) -> None:
        reader, writer = await asyncio.open_connection(*parse_address(self.address))
        try:
            protocol.keep_alive(writer)
            welcome = await self._shake_hands(reader, writer)
            self._is_self = welcome.agent == self._facts.agent
            if not self._is_self:
                await self._agent.connect(welcome.agent, welcome.metadata)
                self._link = _Link(reader, writer, welcome)
        finally:
            if self._link is None:
                writer.close()

    async def _shake_hands(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Welcome:
        facts = self._facts
        challenge = await protocol.expect(reader, Challenge, protocol.MAX_HELLO_BYTES)
        if challenge.version != protocol.VERSION:
            raise PeerProtocolError(
                f"it speaks version {challenge.version}, this is version {protocol.VERSION}"
            )
        if len(challenge.nonce) != protocol.NONCE_BYTES:
            raise PeerProtocolError("its challenge has another length")
        nonce, secret = secrets.token_bytes(protocol.NONCE_BYTES), await facts.secret()
        mine = protocol.proof(secret, b"client", challenge, nonce, facts.identity)
        hello = PeerHello(protocol.VERSION, nonce, facts.identity, facts.chunk_bytes, mine)
        writer.write(protocol.encode(hello))
        await writer.drain()
        welcome = await protocol.expect(reader, Welcome, protocol.MAX_FRAME_BYTES)
        agent = protocol.agent_digest(welcome.agent, welcome.metadata)
        wanted = protocol.proof(secret, b"server", challenge, nonce, facts.identity, agent)
        if not protocol.is_proof(welcome.proof, wanted):
            raise PeerProtocolError("it does not know the secret: compare the secret_file of both")
        return welcome


class Peers:
    """All peers of one engine. Takes the arguments of ``Peer``."""

    def __init__(
        self,
        addresses: Sequence[str],
        facts: Facts,
        agent: Agent,
        timeout_s: float,
        warn: Callable[[str, str], None],
    ) -> None:
        self.members = [Peer(address, facts, agent, timeout_s, warn) for address in addresses]
        self.patience_s = _PATIENCE * timeout_s
        self._tasks: list[asyncio.Task[None]] = []
        self._lookups: set[asyncio.Task[None]] = set()
        # times when all peers were asked, ascending
        self._asked_s: OrderedDict[OffloadKey, float] = OrderedDict()

    async def open(self) -> None:
        """Start to connect in the background; wait for a limited time until each peer has been tried once."""
        self._tasks = [asyncio.create_task(peer.keep_connected()) for peer in self.members]
        with anyio.move_on_after(_FIRST_TRIES_S):
            for peer in self.members:
                await peer.was_tried.wait()

    def stop(self) -> None:
        """Disconnect from all peers. From now on none is asked or read."""
        for task in self._tasks:
            task.cancel()
        for peer in self.members:
            peer.close()

    async def aclose(self) -> None:
        """Stop, and wait until all background tasks have ended."""
        self.stop()
        if tasks := [*self._tasks, *self._lookups]:
            await asyncio.wait(tasks)

    async def locate(
        self, keys: Sequence[OffloadKey], addresses: Collection[str] = ()
    ) -> dict[OffloadKey, Peer]:
        """Ask all connected peers; return the holder to read from for each key that a peer holds.

        Peers at ``addresses``, if any, are asked first. The others are asked only for keys that these do not
        hold: at the first lookup of a key, every second after that, and when one of these does not answer.
        """
        for peer in self.members:
            peer.drop_if_closed()
        peers = [peer for peer in self.members if peer.can_be_asked]
        named = [peer for peer in peers if peer.address in addresses]
        if not named:
            return await self._ask(peers, keys)
        found = await self._ask(named, keys, self.patience_s)
        missing = [key for key in keys if key not in found]
        others = [peer for peer in peers if peer not in named and peer.can_be_asked]
        if all(peer.can_be_asked for peer in named):
            missing = self._due(missing)
        return found | await self._ask(others, missing) if missing else found

    def _due(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the keys for which all peers are due to be asked again, and record the time."""
        now_s, asked_s = asyncio.get_running_loop().time(), self._asked_s
        past_s = now_s - _ASK_ALL_EVERY_S
        while asked_s and (len(asked_s) > _MOST_ASKED or next(iter(asked_s.values())) <= past_s):
            asked_s.popitem(last=False)
        due = [key for key in keys if key not in asked_s]
        asked_s.update(dict.fromkeys(due, now_s))
        return due

    async def _ask(
        self, peers: Sequence[Peer], keys: Sequence[OffloadKey], limit_s: float | None = None
    ) -> dict[OffloadKey, Peer]:
        """Return the holder to read from for each key that a peer holds. ``limit_s`` bounds the wait."""
        holders: dict[OffloadKey, list[Peer]] = {key: [] for key in keys}
        asked = {asyncio.create_task(_look_up(peer, keys, holders)): peer for peer in peers}
        self._lookups.update(asked)
        for task in asked:
            task.add_done_callback(self._lookups.discard)
        try:
            late = await self._answers(asked, limit_s)
        except BaseException:
            for task in asked:
                task.cancel()
            raise
        for task in late:
            asked[task].is_late = True
            task.add_done_callback(partial(_note_answer, asked[task]))
        return share_out({key: held for key, held in holders.items() if held}, lambda peer: peer.pace)

    async def _answers(
        self, waiting: Collection[asyncio.Task[None]], within_s: float | None
    ) -> Collection[asyncio.Task[None]]:
        """Wait until the tasks end.

        Return those that exceed the limit or are much slower than the faster half.
        """
        loop = asyncio.get_running_loop()
        half, begun_s = len(waiting) // 2, loop.time()
        limit_s = None if within_s is None else begun_s + within_s
        while waiting:
            left_s = None if limit_s is None else limit_s - loop.time()
            done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            for task in done:
                task.result()
            if limit_s is None and len(waiting) <= half:
                limit_s = 2 * loop.time() - begun_s + self.patience_s
        return waiting


async def _look_up(peer: Peer, keys: Sequence[OffloadKey], holders: Mapping[OffloadKey, list[Peer]]) -> None:
    """Ask one peer; record it as a holder of the keys that it holds."""
    with suppress(PeerError):  # The error is logged, and the peer is dropped.
        held = await peer.lookup(keys)
        for key, is_held in zip(keys, held, strict=True):
            if is_held:
                holders[key].append(peer)


def _note_answer(peer: Peer, _: asyncio.Task[None]) -> None:
    peer.is_late = False


def _pieces(keys: Sequence[OffloadKey]) -> list[tuple[OffloadKey, ...]]:
    size = protocol.MAX_KEYS
    return [tuple(keys[first : first + size]) for first in range(0, len(keys), size)]


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    return str(error) or type(error).__name__
