"""The Redis tier: chunks in Redis or Valkey, moved between sockets and slots without a copy."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import ClassVar, Final, TypeVar

import anyio
from redis.exceptions import RedisError

from kvtier.errors import StateError, TierError
from kvtier.keys import OffloadKey
from kvtier.tiers.base import (
    TRAILER_BYTES,
    Batch,
    Outcome,
    SecondaryTier,
    Status,
    TierConfig,
    TierContext,
    Usage,
)
from kvtier.tiers.drain import until_done
from kvtier.tiers.faults import require_fault
from kvtier_redis import answers, exchange
from kvtier_redis.answers import LATE, REASONS, TRANSIENT, Complaints, End
from kvtier_redis.config import Address, RedisConfig
from kvtier_redis.control import Control, Fill, Servers, index_of
from kvtier_redis.dial import Dialer, PasswordFileError
from kvtier_redis.exchange import Chunk, Form
from kvtier_redis.line import Lines, Threads
from kvtier_redis.wire import Refused, Reply

_LINE_BYTES: Final = 4 * 2**20  # less is not worth a thread, and a question first, of its own
_LOOK_EVERY_S: Final = 1.0
_FIND_EVERY_S: Final = 0.2
_ANSWER_SHARE: Final = 0.9  # of the deadline, after which kvtier would have the rest of a batch, too
_SWEEP_S: Final = 30.0
_LAST_SWEEP_S: Final = 1.5
_JOIN_S: Final = 1.0
T = TypeVar("T")

_log = logging.getLogger("kvtier.tiers.redis")


class _Server:
    """The connections to one server: for gets, for puts, and for questions."""

    def __init__(self, make: Callable[[], object], count: int, threads: Threads) -> None:
        self.gets = Lines(make, count, threads)
        self.puts = Lines(make, count, threads)
        self.questions = Lines(make, 1, threads)

    def close(self) -> None:
        for lines in (self.gets, self.puts, self.questions):
            lines.close()


class RedisTier(SecondaryTier[RedisConfig]):
    """Keeps chunks in Redis or Valkey: one server, a primary that sentinels name, or a cluster.

    Several engines may share it. Chunks leave when the server evicts them or when their time is over,
    and nobody is told. Whatever a server says or does not say, a get ends as a miss and a put as a refusal,
    with a reason, before ``deadline_s`` is over.

    When a put or a get is cancelled its connections are cut, and it ends when the threads have let go of its
    slots, which is at once. A value that was sent in part is none to the server.
    """

    Config: ClassVar[type[TierConfig]] = RedisConfig
    reasons: ClassVar[Mapping[str, str]] = REASONS
    transient: ClassVar[Collection[str]] = TRANSIENT

    def __init__(self, config: RedisConfig) -> None:
        super().__init__(config)
        self._threads = Threads()
        self._control: Control | None = None
        self._epoch: str | None = None
        self._servers = Servers(())
        self._connected: dict[Address, _Server] = {}
        self._fill: Fill | None = None
        self._put_since = 0  # bytes put since the servers were asked how full they are
        self._upkeep: asyncio.Task[None] | None = None
        self._look = asyncio.Event()
        self._resetting = anyio.Lock()
        self._dead: list[str] = []  # epochs of this opener alone that it has given up

    # --------------------------------------------------------------------- opening, closing

    async def open(self, context: TierContext) -> None:
        """Find the servers and join the epoch of the cache's place. See ``SecondaryTier.open``."""
        self._complaints = Complaints(context.name)
        self._form = Form(context.chunk_bytes, int(self.config.value_bytes), self.config.ttl_s)
        try:
            make = partial(Dialer, self.config, f"kvtier-{context.name}".replace(" ", "-"))
            self._dialer = await self._threads.aside(make)
        except PasswordFileError as error:
            raise TierError(f"tier {context.name}: {error}") from error
        control = Control(self.config, context, self._dialer)
        try:
            self._servers, self._epoch, self._fill = await self._threads.aside(control.open)
        except BaseException:
            control.close()
            raise
        self._control = control
        self._upkeep = asyncio.create_task(self._look_after(control), name=f"{context.name}-upkeep")

    async def aclose(self) -> None:
        """Hang up. What was put after a reset is removed as far as a moment allows; the rest expires."""
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.wait((self._upkeep,))
        if self._epoch is not None and self._epoch.startswith("own-"):
            self._dead.append(self._epoch)
        self._epoch = None
        try:
            if self._control is not None and self._dead:
                with anyio.move_on_after(_LAST_SWEEP_S):
                    await self._sweep(self._control, _LAST_SWEEP_S)
        finally:
            for server in self._connected.values():
                server.close()
            self._connected.clear()
            await self._threads.join(_JOIN_S)
            if self._control is not None:
                self._control.close()

    # ----------------------------------------------------------------------------- the verbs

    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Ask which keys are there. See ``SecondaryTier.contains``."""
        names = self._names(keys)
        found = await self._ask(exchange.exist, names)
        return [found.get(name) == 1 for name in names] or [False] * len(keys)

    async def put(self, batch: Batch) -> Outcome:
        """Send the chunks that are not there yet. See ``SecondaryTier.put``."""
        names = self._names(batch.keys)
        if not names and len(batch):
            return Outcome.all(Status.REFUSED, len(batch), "reset")
        if self._fill is not None and self._put_since + batch.nbytes > self._fill.room_bytes:
            return Outcome.all(Status.REFUSED, len(batch), "full")
        self._put_since += batch.nbytes
        trailers = [bytearray(trailer) for trailer in batch.trailers]
        return await self._move(exchange.put, batch, names, trailers, lambda server: server.puts)

    async def get(self, batch: Batch) -> Outcome:
        """Receive chunks into their slots. See ``SecondaryTier.get``."""
        names = self._names(batch.keys)
        if not names:
            return Outcome.all(Status.ABSENT, len(batch))
        trailers = [bytearray(TRAILER_BYTES) for _ in names]
        outcome = await self._move(exchange.get, batch, names, trailers, lambda server: server.gets)
        batch.trailers[:] = map(bytes, trailers)
        return outcome

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Let the keys live on. See ``SecondaryTier.touch``."""
        await self._ask(exchange.touch, self._names(keys), self._form)

    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Remove the keys. See ``SecondaryTier.discard``."""
        await self._ask(exchange.discard, self._names(keys), self._form)

    async def reset(self) -> None:
        """Start an epoch for this opener alone. See ``SecondaryTier.reset``.

        Raises:
            TierError: the servers could not be told, so that whoever opens later would find what was put
                before. The tier has nothing and takes nothing until a reset succeeds.
        """
        async with self._resetting:
            old, self._epoch = self._epoch, None
            if old is not None and old.startswith("own-"):
                self._dead.append(old)
            await until_done(self._advance())

    async def _advance(self) -> None:
        self._epoch = await self._threads.aside(partial(self._here.reset, self._servers))

    def usage(self) -> Usage | None:
        """Say how full the servers were about a second ago, other users' keys included."""
        if self._fill is None:
            return None
        return Usage(min(self._fill.used_bytes, self._fill.limit_bytes), self._fill.limit_bytes)

    # ------------------------------------------------------------------------------- chunks

    @property
    def _here(self) -> Control:
        if self._control is None:
            raise StateError("the Redis tier is not open")
        return self._control

    def _names(self, keys: Iterable[OffloadKey]) -> list[bytes]:
        """Return what keys are called at the servers; nothing while a reset is under way.

        All parts of a chunk are on one server: what is in braces decides about that.
        """
        if self._epoch is None:
            return []
        start = self._here.chunks(self._epoch).encode()
        return [b"%b{%b}" % (start, key.hex().encode()) for key in keys]

    async def _move(
        self,
        job: Callable[..., None],
        batch: Batch,
        names: Sequence[bytes],
        trailers: Sequence[bytearray],
        choose: Callable[[_Server], Lines],
    ) -> Outcome:
        chunks = [Chunk(*parts) for parts in zip(names, batch.views, trailers, strict=True)]
        await self._on_lines(
            [
                (lines, partial(job, form=self._form, chunks=part), part)
                for address, some in self._by_server(chunks, lambda chunk: chunk.name).items()
                for lines in [choose(self._server(address))]
                for part in _split(some, lines.count, self._form.chunk_bytes)
            ]
        )
        return self._outcome([chunk.end or LATE for chunk in chunks])

    async def _ask(
        self, job: Callable[..., Sequence[Reply]], names: Sequence[bytes], *form: Form
    ) -> dict[bytes, Reply]:
        """Ask something for each name. Who does not answer in time has not answered."""
        found: dict[bytes, Reply] = {}

        def ask(wire: object, some: Sequence[bytes]) -> None:
            replies = job(wire, *form, some)
            found.update(zip(some, replies, strict=False))

        await self._on_lines(
            [
                (self._server(address).questions, partial(ask, some=some), ())
                for address, some in self._by_server(list(dict.fromkeys(names)), bytes).items()
            ]
        )
        for reply in found.values():
            if isinstance(reply, Refused):
                self._complain(answers.end_of(reply).reason, reply)
        return found

    async def _on_lines(self, jobs: Sequence[tuple[Lines, Callable[..., None], Sequence[Chunk]]]) -> None:
        """Do jobs at once, each on a connection, until the deadline."""
        patience_s = _ANSWER_SHARE * self.config.deadline_s
        with anyio.move_on_after(patience_s) as scope:
            async with anyio.create_task_group() as tasks:
                for lines, job, chunks in jobs:
                    tasks.start_soon(self._on_line, lines, job, chunks)
        if scope.cancelled_caught:
            self._complain("timeout", f"no answer within {patience_s:g} s")

    async def _on_line(self, lines: Lines, job: Callable[..., None], chunks: Sequence[Chunk]) -> None:
        try:
            async with lines.one() as line:
                await line.run(job)
        except Exception as error:  # whatever a server or the client comes up with is a miss
            word = answers.word_for(error)
            self._complain(word, error)
            for chunk in chunks:
                chunk.end = chunk.end or End(Status.FAILED, word)

    def _outcome(self, ends: Sequence[End]) -> Outcome:
        reasons = Counter(end.reason for end in ends if end.reason)
        for reason in reasons:
            if answers.means_another_server(reason):
                self._look.set()
        return Outcome([end.status for end in ends], reasons)

    def _complain(self, word: str, text: object) -> None:
        self._complaints.note(word, self._dialer.hide(text))
        if answers.means_another_server(word):
            self._look.set()

    # ------------------------------------------------------------------------------ servers

    def _by_server(self, items: Sequence[T], name: Callable[[T], bytes]) -> dict[Address, list[T]]:
        servers = self._servers
        found: dict[Address, list[T]] = {}
        for item in items:
            found.setdefault(servers.addresses[index_of(servers, name(item))], []).append(item)
        return found

    def _server(self, address: Address) -> _Server:
        if address not in self._connected:
            make = partial(self._dialer.connection, address)
            self._connected[address] = _Server(make, self.config.connections, self._threads)
        return self._connected[address]

    def _move_to(self, servers: Servers) -> None:
        """Use these servers from now on."""
        self._servers = servers
        for address in self._connected.keys() - set(servers.addresses):
            self._connected.pop(address).close()

    async def _look_after(self, control: Control) -> None:
        """Look now and then how full the servers are and, where something hints at it, which they are."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await self._look.wait()
            try:
                if self._look.is_set():
                    self._look.clear()
                    find = partial(control.find, self._servers.addresses)
                    self._move_to(await self._threads.aside(find))
                    await asyncio.sleep(_FIND_EVERY_S)
                put_before = self._put_since
                self._fill = await self._threads.aside(partial(control.fill, self._servers))
                self._put_since -= put_before
                await self._sweep(control, _SWEEP_S)
            except BaseException as error:  # the next look may go well
                require_fault(error)
                self._complain(answers.word_for(error), error)
                await asyncio.sleep(_LOOK_EVERY_S)

    async def _sweep(self, control: Control, seconds: float) -> None:
        while self._dead:
            until = time.monotonic() + seconds
            with suppress(RedisError, OSError):
                await self._threads.aside(partial(control.sweep, self._servers, self._dead[0], until))
            self._dead.pop(0)


def _split(chunks: Sequence[T], most: int, chunk_bytes: int) -> list[Sequence[T]]:
    """Cut chunks into parts for as many connections as they are worth."""
    count = max(1, min(most, len(chunks), len(chunks) * chunk_bytes // _LINE_BYTES))
    size = -(-len(chunks) // count)
    return [chunks[start : start + size] for start in range(0, len(chunks), size)]
