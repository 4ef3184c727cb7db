"""The NIXL tier: serves chunks from host memory, and reads chunks from the host memory of peers."""

from __future__ import annotations

import ctypes
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final

import anyio

from kvtier.errors import StateError, TierError
from kvtier.keys import OffloadKey
from kvtier.tiers import (
    Batch,
    GuardedLogger,
    Knowledge,
    LogLimit,
    Outcome,
    SecondaryTier,
    Status,
    TierConfig,
    TierContext,
    Usage,
    in_thread,
)
from kvtier_nixl._agent import Agent, Memory, ReadError
from kvtier_nixl._peers import Peer, PeerError, Peers
from kvtier_nixl._pool import ChunkPool
from kvtier_nixl._protocol import MAX_KEYS
from kvtier_nixl._server import ControlServer, Facts
from kvtier_nixl.config import NixlConfig, is_loopback, parse_address

REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "transfer": "bytes could not be read from the memory of a peer",
        "lease": "the lease of the chunk at a peer ran out while it was read",
    }
)
_DEADLINE_SHARE: Final = 0.9  # At the deadline itself kvtier cancels the call, which loses all of its chunks.
_LEAST_SECRET_BYTES: Final = 16
_LOCATIONS: Final = 65_536
_LOG_INTERVAL_S: Final = 60.0
_COPY_THREADS: Final = 4
_COPIED_AT_ONCE: Final = 2**19
"""Largest copy, in bytes, that is faster than starting it in a thread."""

Result = tuple[Status, str]

_log = GuardedLogger("kvtier.tiers.nixl")


class NixlTier(SecondaryTier[NixlConfig]):
    """Serves chunks of other engines from their host memory, read one-sided by NIXL.

    A put copies chunks into memory that peers may read. A get copies from it, or reads from a peer into
    its own memory and copies from there: a read cannot be stopped, so it must not go straight to a slot.
    """

    Config: ClassVar[type[TierConfig]] = NixlConfig
    reasons: ClassVar[Mapping[str, str]] = REASONS
    transient: ClassVar[Collection[str]] = frozenset(REASONS)

    def __init__(self, config: NixlConfig) -> None:
        super().__init__(config)
        self._copies = anyio.CapacityLimiter(_COPY_THREADS)
        self._log_limit = LogLimit(_LOG_INTERVAL_S)
        self._agent: Agent | None = None
        self._server: ControlServer | None = None
        self._peers: Peers | None = None
        self._pool: ChunkPool | None = None
        self._resets = 0
        self._located: OrderedDict[OffloadKey, Peer] = OrderedDict()

    async def open(self, context: TierContext) -> None:
        """Register memory with NIXL, listen, and begin to connect to peers. See ``SecondaryTier.open``."""
        self._context = context
        rows = int(self.config.serve_bytes) // context.chunk_bytes
        receive_rows = int(self.config.receive_bytes) // context.chunk_bytes
        for setting, count in (("serve_bytes", rows), ("receive_bytes", receive_rows)):
            if not count:
                raise self._error(f"{setting} is less than one chunk ({context.chunk_bytes} bytes); raise it")
        self._pool = ChunkPool(rows, self.config.lease_s, context.removed)
        self._serving = Memory(rows, context.chunk_bytes)
        self._receiving = Memory(receive_rows, context.chunk_bytes)
        try:
            await self._read_secret()
            await self._open_agent()
            await self._connect()
        except BaseException:  # Also on a cancellation, because kvtier closes only tiers that opened.
            await self.aclose()
            raise

    async def _open_agent(self) -> None:
        is_local = all(map(is_loopback, (self.config.listen, *self.config.peers)))
        self._agent = self._new_agent(is_local=is_local)
        try:
            await self._agent.open()
        except ImportError as error:
            raise self._error(
                f"NIXL cannot be imported ({error}); install kvtier-nixl[cuda], or on hosts without NVIDIA "
                'GPUs: pip install numpy && pip install --no-deps "nixl>=1.5.1" "nixl-cu12>=1.5.1"'
            ) from None
        except Exception as error:
            raise self._error(
                f"NIXL does not start ({type(error).__name__}: {error}); see what UCX has logged, and the "
                "variables UCX_TLS and UCX_NET_DEVICES"
            ) from None

    def _new_agent(self, *, is_local: bool) -> Agent:
        """Return an agent that is not open. The simulation overrides this."""
        return Agent(self._serving, self._receiving, is_local=is_local)

    async def _connect(self) -> None:
        agent, context = self._opened, self._context
        facts = Facts(
            secret=self._read_secret,
            identity=context.identity.digest,
            chunk_bytes=context.chunk_bytes,
            agent=agent.name,
            metadata=agent.metadata,
        )
        self._server = ControlServer(facts, self._held, self._serving, self._warn)
        host, port = parse_address(self.config.listen, least_port=0)
        try:
            await self._server.open(host, port)
        except OSError as error:
            raise self._error(
                f"cannot listen at {self.config.listen} ({error}); set listen to a free host:port"
            ) from None
        self._peers = Peers(self.config.peers, facts, agent, self.config.answer_timeout_s, self._warn)
        await self._peers.open()

    async def _read_secret(self) -> bytes:
        """Return the secret. It is read again, because it may have been rotated since the last connection."""
        path: Path | None = self.config.secret_file
        if path is None:
            return b""
        try:
            secret = (await in_thread(path.read_bytes)).strip()
        except OSError as error:
            raise self._error(f"secret_file cannot be read ({error})") from None
        if len(secret) < _LEAST_SECRET_BYTES:
            raise self._error(
                f"secret_file {path} has less than {_LEAST_SECRET_BYTES} bytes; make one with: "
                f"openssl rand -hex 32 > {path}"
            )
        return secret

    async def aclose(self) -> None:
        """Disconnect from peers, and release NIXL and its memory."""
        with anyio.CancelScope(shield=True):
            await self._isolate()
            agent, self._agent = self._agent, None
            if agent is not None:
                await agent.aclose()
        self._pool = None

    async def _isolate(self) -> None:
        """Stop serving and reading from peers, even if this is cancelled. A second call waits again."""
        ends = [end for end in (self._server, self._peers) if end is not None]
        self._located.clear()
        for end in ends:  # Call both before the first await.
            end.stop()
        for end in ends:
            await end.aclose()
        self._server = self._peers = None

    def usage(self) -> Usage | None:
        """Return how much of the serving memory is in use."""
        if self._pool is None:
            return None
        length = self._serving.row_bytes
        return Usage(len(self._pool) * length, self._pool.rows * length)

    def known(self, keys: Sequence[OffloadKey]) -> Sequence[Knowledge]:
        """Return which keys this engine itself serves. All other keys are unknown."""
        pool = self._held
        elsewhere = Knowledge.ABSENT if self._peers is None or not self.config.peers else Knowledge.UNKNOWN
        return [Knowledge.PRESENT if key in pool else elsewhere for key in keys]

    async def contains(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Return which keys this engine or a connected peer holds. See ``SecondaryTier.contains``."""
        return await self.contains_at(keys, ())

    async def contains_at(self, keys: Sequence[OffloadKey], addresses: Sequence[str]) -> Sequence[bool]:
        """Do the same, but ask the peers at ``addresses`` first. See ``SecondaryTier.contains_at``."""
        resets = self._resets
        wanted = [key for key in dict.fromkeys(keys) if key not in self._held]
        elsewhere = await self._locate(wanted, addresses)
        if resets == self._resets:
            self._located.update(elsewhere)  # used by the next get
        while len(self._located) > _LOCATIONS:
            self._located.popitem(last=False)
        return [key in self._held or key in elsewhere for key in keys]

    async def put(self, batch: Batch) -> Outcome:
        """Copy chunks into the serving memory. See ``SecondaryTier.put``."""
        pool, resets = self._held, self._resets
        new = [index for index, key in enumerate(batch.keys) if key not in pool]
        pool.touch(batch.keys)
        rows = pool.reserve(len(new), time.monotonic())
        taken = dict(zip(new, rows, strict=False))
        try:
            await self._copy(len(taken), partial(self._copy_in, batch, taken))
        except BaseException:
            for row in rows:
                pool.give_back(row)
            raise
        for index, row in taken.items():
            if resets == self._resets:
                pool.publish(batch.keys[index], row, batch.trailers[index])
            else:
                pool.give_back(row)
        if resets != self._resets:  # Chunks of a put that started before a reset must not appear after it.
            return Outcome.all(Status.REFUSED, len(batch), "reset")
        # Some chunks may have been evicted meanwhile, to make room for others.
        statuses = [Status.OK if key in pool else Status.REFUSED for key in batch.keys]
        full = statuses.count(Status.REFUSED)
        return Outcome(statuses, {"full": full} if full else {})

    async def get(self, batch: Batch) -> Outcome:
        """Copy chunks from this engine's or a peer's serving memory. See ``SecondaryTier.get``."""
        results: dict[int, Result] = {}
        await self._get_own(batch, results)
        wanted = [index for index in range(len(batch)) if index not in results]
        if wanted:
            try:
                with anyio.move_on_after(_DEADLINE_SHARE * self.config.deadline_s) as limit:
                    await self._get_from_peers(batch, wanted, results)
                if limit.cancelled_caught:
                    self._give_up(batch, wanted, results)
            finally:
                if self._agent is not None and self._agent.is_stuck:
                    self._context.lost("its receiving memory is held by reads of peers that do not answer")
        answers = [results.get(index, (Status.ABSENT, "")) for index in range(len(batch))]
        return Outcome([status for status, _ in answers], Counter(reason for _, reason in answers if reason))

    async def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Stop serving the keys. Peers keep theirs. See ``SecondaryTier.discard``."""
        for key in keys:
            self._held.discard(key)
            self._located.pop(key, None)

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Mark the keys as recently used. See ``SecondaryTier.touch``."""
        self._held.touch(keys)

    async def reset(self) -> None:
        """Forget all chunks, and stop serving peers and reading from them. See ``SecondaryTier.reset``."""
        self._resets += 1
        pool = self._held
        try:
            await self._isolate()
        finally:
            pool.clear()

    # --- own chunks ------------------------------------------------------------------------------

    async def _get_own(self, batch: Batch, results: dict[int, Result]) -> None:
        pool = self._held
        pinned = {
            index: chunk for index, key in enumerate(batch.keys) if (chunk := pool.pin(key)) is not None
        }
        rows = {index: chunk.row for index, chunk in pinned.items()}
        try:
            if rows:
                await self._copy(len(rows), partial(self._copy_out, self._serving, batch, rows))
        finally:
            for row in rows.values():
                pool.unpin(row)
        for index, chunk in pinned.items():
            batch.trailers[index] = chunk.trailer
            results[index] = Status.OK, ""

    async def _copy(self, chunks: int, copy: Callable[[], None]) -> None:
        if chunks * self._context.chunk_bytes <= _COPIED_AT_ONCE:
            copy()
        else:
            await in_thread(copy, limiter=self._copies)

    def _copy_in(self, batch: Batch, rows: Mapping[int, int]) -> None:
        length, base = batch.memory.chunk_bytes, batch.memory.address
        for index, row in rows.items():
            ctypes.memmove(self._serving.address(row), base + batch.slots[index] * length, length)

    def _copy_out(self, source: Memory, batch: Batch, rows: Mapping[int, int]) -> None:
        length, base = batch.memory.chunk_bytes, batch.memory.address
        for index, row in rows.items():
            ctypes.memmove(base + batch.slots[index] * length, source.address(row), length)

    # --- chunks of peers -------------------------------------------------------------------------

    async def _locate(
        self, keys: Sequence[OffloadKey], addresses: Sequence[str] = ()
    ) -> dict[OffloadKey, Peer]:
        """Return a holder among the connected peers for each key that one holds. See ``Peers.locate``."""
        return await self._peers.locate(keys, addresses) if self._peers is not None and keys else {}

    async def _get_from_peers(self, batch: Batch, wanted: Sequence[int], results: dict[int, Result]) -> None:
        keys = [batch.keys[index] for index in wanted]
        known = {key: peer for key in keys if (peer := self._located.pop(key, None)) and peer.can_be_asked}
        found = await self._locate([key for key in keys if key not in known]) | known
        by_peer: dict[Peer, list[int]] = {}
        for index, key in zip(wanted, keys, strict=True):
            if key in found:
                by_peer.setdefault(found[key], []).append(index)
        async with anyio.create_task_group() as tasks:
            for peer, indices in by_peer.items():
                tasks.start_soon(self._get_from, peer, batch, indices, results)

    async def _get_from(
        self, peer: Peer, batch: Batch, indices: Sequence[int], results: dict[int, Result]
    ) -> None:
        """Get chunks from one peer, as many at once as fit into the receiving memory."""
        left = list(indices)
        resets = self._resets
        try:
            while left and resets == self._resets:
                rows = await self._opened.take_rows(min(len(left), MAX_KEYS))
                part, left = left[: len(rows)], left[len(rows) :]
                await self._read(peer, batch, dict(zip(part, rows, strict=True)), results)
        except PeerError:  # The peer is dropped if it is at fault.
            _fail(indices, results, "connection")
        except ReadError:
            _fail(indices, results, "transfer")

    async def _read(self, peer: Peer, batch: Batch, rows: dict[int, int], results: dict[int, Result]) -> None:
        """Lease chunks, read them into rows, and copy them to their slots if the lease was still valid."""
        agent, resets = self._opened, self._resets
        try:
            lease = await peer.lease([batch.keys[index] for index in rows])
        except BaseException:
            agent.free_rows(list(rows.values()))
            raise
        offers = zip(rows, lease.addresses, lease.trailers, strict=True)
        there = {index: (address, trailer) for index, address, trailer in offers if address}
        agent.free_rows([row for index, row in rows.items() if index not in there])
        if not there:
            return
        used = {index: rows[index] for index in there}
        await peer.read([address for address, _ in there.values()], list(used.values()))
        try:
            if not peer.release(lease):
                results.update(dict.fromkeys(there, (Status.FAILED, "lease")))
                self._warn(
                    f"lease {peer.address}", f"peer {peer.address}: {len(there)} chunks; raise lease_s there"
                )
            elif resets == self._resets:
                await self._copy(len(used), partial(self._copy_out, self._receiving, batch, used))
                for index, (_, trailer) in there.items():
                    batch.trailers[index] = trailer
                    results[index] = Status.OK, ""
        finally:
            agent.free_rows(list(used.values()))

    def _give_up(self, batch: Batch, wanted: Sequence[int], results: dict[int, Result]) -> None:
        """Fail the chunks that did not arrive in time.

        A read in flight keeps its receiving memory, but no slots.
        """
        late = [index for index in wanted if index not in results]
        results.update(dict.fromkeys(late, (Status.FAILED, "timeout")))
        self._warn("timeout", f"{len(late)} of {len(batch)} chunks did not arrive in time")

    # --- helpers ---------------------------------------------------------------------------------

    @property
    def _held(self) -> ChunkPool:
        if self._pool is None:
            raise StateError("the NIXL tier is not open")
        return self._pool

    @property
    def _opened(self) -> Agent:
        if self._agent is None:
            raise StateError("the NIXL tier is not open")
        return self._agent

    def _error(self, text: str) -> TierError:
        return TierError(f"tier {self._context.name}: {text}")

    def _warn(self, subject: str, text: str) -> None:
        """Log a fault with its reason and detail, rate-limited for each subject."""
        repeats = self._log_limit.allow(subject, time.monotonic())
        if repeats is not None:
            reason = subject.partition(" ")[0]
            _log.warning("tier %s: %s: %s%s", self._context.name, reason, text, repeats)


def _fail(indices: Sequence[int], results: dict[int, Result], reason: str) -> None:
    failed = [index for index in indices if index not in results]
    results.update(dict.fromkeys(failed, (Status.FAILED, reason)))
