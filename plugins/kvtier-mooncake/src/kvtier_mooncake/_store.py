"""Mooncake's client: opening it, its result codes, and the record of a cache's epoch.

All calls block, and may come from several threads. No transfer continues after its put or get has returned.
Opening and closing hold the interpreter lock for some tenths of a second; other calls release it.

**Epochs.** The keys of chunks contain an epoch, a random token. The key ``<cache>/epoch`` holds the epoch
that tiers join when they open. A reset stores a new one there, and continues in a private epoch that no other
tier knows, because only this process may have the new weights. No chunk put before the reset is found again,
even if the pool loses the key: the next tier that opens then makes a new epoch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from kvtier.errors import TierError
from kvtier.tiers import TRAILER_BYTES, Batch, SlotMemory, Status, TierContext
from kvtier_mooncake._client import (
    LEASE_EXPIRED,
    NO_ROOM,
    NOT_READABLE,
    TRANSFER,
    UNREACHABLE,
    WRONG_SIZE,
    SharedClient,
    Stopwatch,
    may_go_on,
)
from kvtier_mooncake.config import MooncakeConfig

REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "transfer": "bytes could not be moved from or to the memory of another client of the pool",
        "lease": "the chunk's lease ran out while it was read",
    }
)
TRANSIENT: Final = frozenset({"transfer", "lease"})
ROWS: Final = 64
"""Chunks that one call of the client moves at most: it has room for this many trailers."""

_OK: Final = 0
_CONNECT_S: Final = 3.0
_BUFFER_BYTES: Final = 16 * 2**20
_LOG_ERRORS_ALONE: Final = "2"


def result_of(code: int, expected: int = _OK) -> tuple[Status, str]:
    """Return the status of a chunk, and the reason if one is counted, for a result code of the client.

    Args:
        code: a result code of the client.
        expected: its code for success: a number of bytes for a get.
    """
    if code == expected:
        return Status.OK, ""
    if code in NOT_READABLE:
        return Status.ABSENT, ""
    if code == NO_ROOM:
        return Status.REFUSED, "full"
    if code == WRONG_SIZE or code >= 0:
        return Status.CORRUPT, "torn"
    if code in UNREACHABLE:
        return Status.FAILED, "connection"
    return Status.FAILED, {TRANSFER: "transfer", LEASE_EXPIRED: "lease"}.get(code, "error")


def _result_of_put(code: int) -> tuple[Status, str]:
    """Return the result of a put. It has failed if another client removed the chunk meanwhile."""
    status, reason = result_of(code)
    return (Status.FAILED, "error") if status in (Status.ABSENT, Status.CORRUPT) else (status, reason)


class Trailers:
    """Memory that the client may read and write, with room for the trailers of ``ROWS`` chunks."""

    def __init__(self) -> None:
        self._bytes = memoryview(mmap.mmap(-1, ROWS * TRAILER_BYTES))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))
        self.nbytes = self._bytes.nbytes

    def __getitem__(self, row: int) -> memoryview:
        return self._bytes[row * TRAILER_BYTES : (row + 1) * TRAILER_BYTES]


class Store:
    """A client of the pool, for one tier.

    Raises:
        TierError: the client library is missing, or the master or the metadata server cannot be reached.
    """

    def __init__(self, config: MooncakeConfig, context: TierContext) -> None:
        self._config = config
        self._name = context.name
        self._lost = context.lost
        self._cache = f"{config.key_prefix}/{context.identity.namespace}"
        self._registered: dict[int, object] = {}  # Buffers by address, kept until the client is closed.
        self._registering = threading.Lock()
        module = self._library()
        self._put_config = module.ReplicateConfig()
        self._put_config.replica_num = config.replicas
        self._record_config = module.ReplicateConfig()
        self._record_config.replica_num = config.replicas
        # Otherwise the pool would evict the key that names the epoch.
        self._record_config.with_hard_pin = True
        client: Any = module.MooncakeDistributedStore()
        self._client = SharedClient(client)
        self._require_metadata_server()
        code = client.setup(*setup_arguments(config, self._own_address()))
        if code:
            self.close()
            raise self._error(f"Mooncake's client does not start (code {code}): see what it has logged")

    def close(self) -> None:
        """Disconnect. The memory of this client leaves the pool, with the chunks in it."""
        self._client.close()

    def keys(self, epoch: str, keys: Sequence[bytes]) -> list[str]:
        """Return the names of chunks in the pool."""
        return [f"{self._cache}/{epoch}/{key.hex()}" for key in keys]

    def register(self, memory: SlotMemory | Trailers) -> None:
        """Register memory, so that the client reads and writes it directly. Further calls have no effect.

        Raises:
            TierError: the transport does not accept it.
        """
        with self._registering:
            if memory.address in self._registered:
                return
            nbytes = memory.nbytes if isinstance(memory, Trailers) else memory.slots * memory.chunk_bytes
            with self._client.use() as client:
                code = client.register_buffer(memory.address, nbytes)
            if code:
                raise self._error(f"{nbytes} bytes of host memory cannot be registered (code {code})")
            self._registered[memory.address] = memory

    def put(self, names: Sequence[str], batch: Batch, trailers: Trailers) -> list[tuple[Status, str]]:
        """Store chunks and their trailers. Existing chunks stay as they are."""
        self.register(batch.memory)
        results: list[tuple[Status, str]] = []
        for rows in _pieces(len(batch)):
            for row, i in enumerate(rows):
                trailers[row][:] = batch.trailers[i]
            arguments = self._arguments(names, batch, trailers, rows)
            codes = self._move("batch_put_from_multi_buffers", *arguments, self._put_config)
            results += map(_result_of_put, codes)
        return results

    def get(self, names: Sequence[str], batch: Batch, trailers: Trailers) -> list[tuple[Status, str]]:
        """Fetch chunks into their slots, and their trailers."""
        self.register(batch.memory)
        expected = batch.memory.chunk_bytes + TRAILER_BYTES
        results: list[tuple[Status, str]] = []
        for rows in _pieces(len(batch)):
            arguments = self._arguments(names, batch, trailers, rows)
            codes = self._move("batch_get_into_multi_buffers", *arguments)
            for row, (i, code) in enumerate(zip(rows, codes, strict=True)):
                batch.trailers[i] = bytes(trailers[row])
                if code == TRANSFER and not self._has_size(names[i], expected):
                    code = WRONG_SIZE
                results.append(result_of(code, expected))
        return results

    def contains(self, names: Sequence[str]) -> list[int]:
        """Return 1 for present keys, 0 for absent ones, a negative code for failures. Renews their leases."""
        with self._client.use() as client:
            return list(client.batch_is_exist(names))

    def remove(self, names: Sequence[str]) -> list[int]:
        """Remove keys and return their result codes.

        The pool does not wait for leases, because otherwise a damaged chunk would stay for as long as it is
        read. A concurrent reader may get the bytes of the next chunk in the same memory, which do not match
        the trailer.
        """
        with self._client.use() as client:
            return list(client.batch_remove(names, True))

    def join(self) -> str:
        """Return the epoch that tiers join when they open; make a new one if there is none.

        Raises:
            TierError: the epoch can be neither read nor stored.
        """
        name = f"{self._cache}/epoch"
        with self._client.use() as client:
            if found := client.get(name):
                return str(found, "ascii", "replace")
            code = client.put(name, secrets.token_hex(8).encode(), self._record_config)
            if found := client.get(name):  # another tier may have stored its epoch first
                return str(found, "ascii", "replace")
        raise self._error(_hint(code, "the cache's epoch can be neither read nor stored"))

    def advance(self) -> str:
        """Store a new epoch for tiers that open later; return a private one for this tier.

        Raises:
            TierError: the epoch could not be stored.
        """
        name, token = f"{self._cache}/epoch", secrets.token_hex(8).encode()
        with self._client.use() as client:
            code = client.upsert(name, token, self._record_config)
        if code:
            raise self._error(_hint(code, "the reset could not be stored"))
        return f"own-{secrets.token_hex(8)}"

    def _move(self, function: str, *arguments: object) -> list[int]:
        """Move chunks; return the client's result codes when no transfer can be running any more."""
        watch, codes = Stopwatch(), None
        try:
            with self._client.use() as client:
                codes = list(getattr(client, function)(*arguments))
                return codes
        finally:
            if codes is None or may_go_on(codes, watch.seconds, self._config.protocol):
                self._stop_transfers()

    def _stop_transfers(self) -> None:
        if self._client.close():
            self._lost("a transfer did not end in time, and closing the client has stopped it")

    def _arguments(
        self, names: Sequence[str], batch: Batch, trailers: Trailers, rows: range
    ) -> tuple[list[str], list[list[int]], list[list[int]]]:
        base, length = batch.memory.address, batch.memory.chunk_bytes
        pairs = [
            [base + batch.slots[i] * length, trailers.address + row * TRAILER_BYTES]
            for row, i in enumerate(rows)
        ]
        return [names[i] for i in rows], pairs, [[length, TRAILER_BYTES]] * len(rows)

    def _has_size(self, name: str, nbytes: int) -> bool:
        if not self._client.is_usable:
            return True
        with self._client.use() as client:
            found = client.get_size(name)
        return bool(found < 0 or found == nbytes)

    def _library(self) -> Any:
        try:
            return library()
        except ImportError as error:
            raise self._error(
                f"Mooncake's client cannot be imported ({error}); install kvtier-mooncake[cuda] or "
                "kvtier-mooncake[cpu], and the system's libibverbs, libnuma and libcurl"
            ) from None

    def _require_metadata_server(self) -> None:
        """Raise TierError if the server cannot be reached.

        The client would retry for minutes and block Python.
        """
        address = self._config.metadata_address
        if address is None:
            return
        try:
            socket.create_connection(address, _CONNECT_S).close()
        except OSError as error:
            raise self._error(
                f"the metadata server at {self._config.metadata_server} cannot be reached ({error}); start "
                "it, or correct metadata_server"
            ) from None

    def _own_address(self) -> str:
        try:
            return own_address(self._config.master_address)
        except OSError as error:
            raise self._error(
                f"the master at {self._config.master} cannot be reached ({error}); start mooncake_master, "
                "or set master to its host:port"
            ) from None

    def _error(self, text: str) -> TierError:
        return TierError(f"tier {self._name}: {text}")


def library() -> Any:
    """Return Mooncake's module. It is imported late, because it starts threads and reads the environment.

    Raises:
        ImportError: it is not installed, or a system library is missing.
    """
    os.environ.setdefault("GLOG_minloglevel", _LOG_ERRORS_ALONE)
    from mooncake import store

    return store


def setup_arguments(config: MooncakeConfig, own_address: str) -> tuple[str | int, ...]:
    """Return the arguments of the client's ``setup``."""
    return (
        config.local_hostname or own_address,
        config.metadata_server,
        int(config.segment_bytes),
        _BUFFER_BYTES,
        config.protocol,
        ",".join(config.device_names),
        config.master,
    )


def own_address(master: tuple[str, int]) -> str:
    """Return the local address of connections to the master.

    If the master is not alive, this fails at once. Mooncake's client would retry for a minute and a half and
    hold the interpreter lock meanwhile.

    Raises:
        OSError: the master is not alive.
    """
    with socket.create_connection(master, _CONNECT_S) as connection:
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # A master that is alive closes the connection.
        return str(connection.getsockname()[0])


def _pieces(count: int) -> list[range]:
    return [range(first, min(first + ROWS, count)) for first in range(0, count, ROWS)]


def _hint(code: int, what: str) -> str:
    if code == NO_ROOM:
        return (
            f"{what}: no client of the master contributes memory, or all of it is in use; set segment_bytes"
        )
    return f"{what} (code {code})"
