"""The Redis tier: chunks in Redis or Valkey, moved between sockets and slots without a copy."""

from __future__ import annotations

import asyncio
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
from kvtier.tiers import (
    TRAILER_BYTES,
    Batch,
    GuardedLogger,
    LogLimit,
    Outcome,
    SecondaryTier,
    Status,
    TierConfig,
    TierContext,
    Usage,
    require_answers,
    require_fault,
    until_done,
)
from kvtier_redis import _commands
from kvtier_redis._client import ClientFactory
from kvtier_redis._commands import BatchChunk, Question
from kvtier_redis._control import PRIVATE, ControlClient, MemoryUsage, Topology
from kvtier_redis._pool import Connections, WorkerThreads
from kvtier_redis._protocol import ErrorReply, RespSocket, command
from kvtier_redis._reasons import (
    DENIED,
    REASONS,
    TIMED_OUT,
    TOPOLOGY,
    TRANSIENT,
    ChunkResult,
    reason_of,
    result_of,
)
from kvtier_redis.config import Address, RedisConfig

_MAX_VALUE_BYTES: Final = 512 * 2**20  # Redis' default proto-max-bulk-len
_BYTES_PER_CONNECTION: Final = 4 * 2**20  # Fewer bytes are not worth another thread with its own round trip.
_USAGE_INTERVAL_S: Final = 1.0
_DISCOVERY_PAUSE_S: Final = 0.2
_DEADLINE_SHARE: Final = 0.9  # At the deadline itself kvtier cancels the call, which loses all of its chunks.
_CLEANUP_S: Final = 30.0
_CLOSING_CLEANUP_S: Final = 1.5
_THREADS_CLOSE_S: Final = 1.0
_LOG_INTERVAL_S: Final = 60.0
T = TypeVar("T")
_Job = tuple[Connections, Callable[[RespSocket], None], Sequence[BatchChunk | Question]]

_log = GuardedLogger("kvtier.tiers.redis")


class _Server:
    """The connections to one server. Gets, puts and small commands share the idle ones."""

    def __init__(self, factory: ClientFactory, address: Address, size: int, threads: WorkerThreads) -> None:
        pool = factory.pool(address)
        self.gets = Connections(pool, size, threads)
        self.puts = Connections(pool, size, threads)
        self.small = Connections(pool, 1, threads)

    def close(self) -> None:
        for connections in (self.gets, self.puts, self.small):
            connections.close()


class RedisTier(SecondaryTier[RedisConfig]):
    """Stores chunks in Redis or Valkey: one server, a primary that sentinels name, or a cluster.

    Several engines may share it. The server evicts and expires chunks without a notification. Whatever else
    it does, a get ends as a miss and a put as a failure, with a reason, within ``deadline_s``.

    Cancelling a put or a get cuts its connections and waits until their threads have released the slots. The
    server discards a value that it received in part.
    """

    Config: ClassVar[type[TierConfig]] = RedisConfig
    reasons: ClassVar[Mapping[str, str]] = REASONS
    transient: ClassVar[Collection[str]] = TRANSIENT

    def __init__(self, config: RedisConfig) -> None:
        super().__init__(config)
        self._threads = WorkerThreads()
        self._control: ControlClient | None = None
        self._epoch: str | None = None
        self._topology = Topology(())
        self._servers: dict[Address, _Server] = {}
        self._memory: MemoryUsage | None = None
        self._put_bytes = 0  # Bytes put since the servers' memory usage was read.
        self._maintenance: asyncio.Task[None] | None = None
        self._topology_doubted = asyncio.Event()
        self._reset_lock = anyio.Lock()
        self._abandoned: list[str] = []  # private epochs to remove
        self._log_limit = LogLimit(_LOG_INTERVAL_S)

    async def open(self, context: TierContext) -> None:
        """Find the servers and join the cache's epoch. See ``SecondaryTier.open``."""
        self._name = context.name
        self._chunk_bytes = context.chunk_bytes
        if context.chunk_bytes + TRAILER_BYTES > _MAX_VALUE_BYTES:
            raise TierError(
                f"tier {context.name}: chunks of {context.chunk_bytes} bytes exceed the maximum of a Redis "
                f"value ({_MAX_VALUE_BYTES} bytes); choose a smaller block_size"
            )
        self._factory = ClientFactory(self.config, f"kvtier-{context.name}".replace(" ", "-"))
        try:
            control = ControlClient(self.config, context, self._factory)
            try:
                self._topology, self._epoch, self._memory = await self._threads.start(control.open)
            except BaseException:
                control.close()
                raise
        except BaseException:
            await self._threads.close(0)
            raise
        self._control = control
        self._maintenance = asyncio.create_task(self._maintain(control), name=f"{context.name}-maintenance")

    async def aclose(self) -> None:
        """Disconnect. Before that, remove chunks of private epochs for a short time; the rest expires."""
        try:
            if self._maintenance is not None:
                self._maintenance.cancel()
                await asyncio.wait((self._maintenance,))
            self._leave_epoch()
            if self._control is not None and self._abandoned:
                with anyio.move_on_after(_CLOSING_CLEANUP_S):
                    await self._remove_abandoned(self._control, _CLOSING_CLEANUP_S)
        finally:
            for server in self._servers.values():
                server.close()
            self._servers.clear()
            try:
                await self._threads.close(_THREADS_CLOSE_S)
            finally:
                if self._control is not None:
                    self._control.close()

    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Return which keys exist. See ``SecondaryTier.contains``."""
        names = self._redis_keys(keys)
        asked = await self._query(names, b"EXISTS")
        failed = Counter(question.result.reason for question in asked.values() if question.result)
        require_answers(failed, len(asked))
        return [asked[name].reply == 1 for name in names] or [False] * len(keys)

    async def put(self, batch: Batch) -> Outcome:
        """Send the missing chunks. See ``SecondaryTier.put``."""
        names = self._redis_keys(batch.keys)
        if not names and len(batch):
            return Outcome.all(Status.REFUSED, len(batch), "reset")
        if self._memory is not None and self._put_bytes + batch.nbytes > self._memory.free_bytes:
            return Outcome.all(Status.REFUSED, len(batch), "full")
        self._put_bytes += batch.nbytes
        trailers = [bytearray(trailer) for trailer in batch.trailers]
        put = partial(_commands.put, ttl_s=self.config.ttl_s)
        return await self._transfer(put, batch, names, trailers, lambda server: server.puts)

    async def get(self, batch: Batch) -> Outcome:
        """Receive chunks into their slots. See ``SecondaryTier.get``."""
        names = self._redis_keys(batch.keys)
        if not names:
            return Outcome.all(Status.ABSENT, len(batch))
        trailers = [bytearray(TRAILER_BYTES) for _ in names]
        outcome = await self._transfer(_commands.get, batch, names, trailers, lambda server: server.gets)
        batch.trailers[:] = map(bytes, trailers)
        return outcome

    async def reread(self, batch: Batch) -> Outcome:
        """Get chunks over new connections. See ``SecondaryTier.reread``."""
        for server in self._servers.values():
            server.gets.pool.renew()
        return await self.get(batch)

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Restart the expiry of the keys. See ``SecondaryTier.touch``."""
        await self._query(self._redis_keys(keys), b"EXPIRE", self.config.ttl_s)

    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Remove the keys. See ``SecondaryTier.discard``."""
        await self._query(self._redis_keys(keys), b"UNLINK")

    async def reset(self) -> None:
        """Start a private epoch. See ``SecondaryTier.reset``.

        Raises:
            TierError: the new epoch could not be stored, so tiers that open later would find chunks put
                before. This tier finds and accepts no chunks until a reset succeeds.
        """
        async with self._reset_lock:
            self._leave_epoch()
            await until_done(self._advance())

    def usage(self) -> Usage | None:
        """Return how full the servers were a second ago, other clients' keys included."""
        if self._memory is None:
            return None
        return Usage(min(self._memory.used_bytes, self._memory.limit_bytes), self._memory.limit_bytes)

    def _leave_epoch(self) -> None:
        if self._epoch is not None and self._epoch.startswith(PRIVATE):
            self._abandoned.append(self._epoch)
        self._epoch = None

    async def _advance(self) -> None:
        topology, epoch = await self._threads.start(partial(self._opened.reset, self._topology))
        self._use(topology)
        self._epoch = epoch

    @property
    def _opened(self) -> ControlClient:
        if self._control is None:
            raise StateError("the Redis tier is not open")
        return self._control

    def _redis_keys(self, keys: Iterable[OffloadKey]) -> list[bytes]:
        """Return the Redis keys of chunks; none during a reset."""
        if self._epoch is None:
            return []
        prefix = self._opened.key_prefix(self._epoch).encode()
        return [prefix + key.hex().encode() for key in keys]

    async def _transfer(
        self,
        operation: Callable[..., None],
        batch: Batch,
        names: Sequence[bytes],
        trailers: Sequence[bytearray],
        pool_of: Callable[[_Server], Connections],
    ) -> Outcome:
        """Run a put or a get on a number of connections that suits its bytes."""
        chunks = [BatchChunk(*parts) for parts in zip(names, batch.views, trailers, strict=True)]
        jobs = []
        for server, group in self._by_server(chunks, lambda chunk: chunk.key):
            pool = pool_of(server)
            for part in _split(group, pool.size, self._chunk_bytes):
                jobs.append((pool, partial(operation, chunks=part), part))
        await self._run(jobs)
        results = [chunk.result for chunk in chunks]
        reasons = Counter(result.reason for result in results if result.reason)
        if TOPOLOGY & reasons.keys():
            self._topology_doubted.set()
        return Outcome([result.status for result in results], reasons)

    async def _query(self, names: Sequence[bytes], verb: bytes, *args: int) -> dict[bytes, Question]:
        """Send one command per key; return the replies that arrived in time."""
        asked = {name: Question(name) for name in names}

        def run(group: Sequence[Question], sock: RespSocket) -> None:
            commands = [command(verb, question.key, *args) for question in group]
            for question, reply in zip(group, _commands.pipeline(sock, commands), strict=True):
                question.reply = reply
                question.result = result_of(reply) if isinstance(reply, ErrorReply) else None

        groups = self._by_server(list(asked.values()), lambda question: question.key)
        await self._run([(server.small, partial(run, group), group) for server, group in groups])
        for question in asked.values():
            if question.result is not None and question.reply is not None:
                self._warn(question.result.reason, question.reply)
        return asked

    async def _run(self, jobs: Sequence[_Job]) -> None:
        """Run jobs concurrently until the deadline, each on its own connection."""
        timeout_s = _DEADLINE_SHARE * self.config.deadline_s
        with anyio.move_on_after(timeout_s) as scope:
            async with anyio.create_task_group() as tasks:
                for job in jobs:
                    tasks.start_soon(self._run_one, *job)
        if scope.cancelled_caught:
            self._warn("timeout", f"no reply within {timeout_s:g} s")
        for connections, _, parts in jobs:
            # A firewall may have forgotten all connections to this server, or the password may have changed.
            if any(part.result in (TIMED_OUT, DENIED) for part in parts):
                connections.pool.renew()

    async def _run_one(
        self, pool: Connections, call: Callable[[RespSocket], None], parts: Sequence[BatchChunk | Question]
    ) -> None:
        try:
            await pool.run(call)
        except Exception as error:  # Any exception of the server or of redis-py is a miss.
            reason = reason_of(error)
            self._warn(reason, error)
            for part in parts:
                if part.result is TIMED_OUT:
                    part.result = ChunkResult(Status.FAILED, reason)

    def _warn(self, reason: str, text: object) -> None:
        repeats = self._log_limit.allow(reason, time.monotonic())
        if repeats is not None:
            _log.warning("tier %s: %s: %s%s", self._name, reason, self._factory.redact(text), repeats)
        if reason in TOPOLOGY:
            self._topology_doubted.set()

    def _by_server(self, items: Sequence[T], key: Callable[[T], bytes]) -> Iterable[tuple[_Server, list[T]]]:
        groups: dict[Address, list[T]] = {}
        for item in items:
            groups.setdefault(self._topology.server_of(key(item)), []).append(item)
        return [(self._server(address), group) for address, group in groups.items()]

    def _server(self, address: Address) -> _Server:
        if address not in self._servers:
            size = self.config.connections
            self._servers[address] = _Server(self._factory, address, size, self._threads)
        return self._servers[address]

    async def _maintain(self, control: ControlClient) -> None:
        """Watch the servers. Remove abandoned epochs in a separate task, because many keys take long."""
        removing: asyncio.Task[None] | None = None
        try:
            while True:
                await self._watch(control)
                if self._abandoned and (removing is None or removing.done()):
                    removing = asyncio.create_task(self._remove_abandoned(control, _CLEANUP_S))
        finally:
            if removing is not None:
                removing.cancel()

    async def _watch(self, control: ControlClient) -> None:
        """Read the memory usage after a second, and discover the servers after an error that suggests it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_USAGE_INTERVAL_S):
                await self._topology_doubted.wait()
        try:
            if self._topology_doubted.is_set():
                await self._rediscover(control)
            put_before = self._put_bytes
            self._memory = await self._threads.start(partial(control.memory_usage, self._topology))
            self._put_bytes -= put_before
        except BaseException as error:  # the next attempt may succeed
            require_fault(error)
            self._warn(reason_of(error), error)
            await asyncio.sleep(_USAGE_INTERVAL_S)

    async def _rediscover(self, control: ControlClient) -> None:
        self._topology_doubted.clear()
        self._use(await self._threads.start(partial(control.discover, self._topology.addresses)))
        await asyncio.sleep(_DISCOVERY_PAUSE_S)

    def _use(self, topology: Topology) -> None:
        """Use the servers of ``topology``, and close the connections to others."""
        self._topology = topology
        for address in self._servers.keys() - set(topology.addresses):
            self._servers.pop(address).close()

    async def _remove_abandoned(self, control: ControlClient, timeout_s: float) -> None:
        while self._abandoned:
            deadline = time.monotonic() + timeout_s
            remove = partial(control.remove_epoch, self._topology, self._abandoned[0], deadline)
            with suppress(RedisError, OSError):
                await self._threads.start(remove)
            self._abandoned.pop(0)


def _split(chunks: Sequence[T], connections: int, chunk_bytes: int) -> list[Sequence[T]]:
    """Split chunks into parts, one for each connection that is worth using."""
    count = max(1, min(connections, len(chunks), len(chunks) * chunk_bytes // _BYTES_PER_CONNECTION))
    size = -(-len(chunks) // count)
    return [chunks[start : start + size] for start in range(0, len(chunks), size)]
