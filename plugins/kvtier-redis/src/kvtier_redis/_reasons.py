"""The reasons of failed chunks, for error replies and exceptions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    ResponseError,
    TimeoutError,
)

from kvtier.tiers import Status
from kvtier_redis._protocol import ErrorReply

REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "denied": "authentication failed, or the ACL user lacks a permission",
        "readonly": "the server is a replica and takes no writes",
        "loading": "the server is loading its data set from disk",
        "moved": "the cluster has moved the key's slot to another server",
        "clusterdown": "no server of the cluster serves the key's slot",
        "misconf": "the server takes no writes: its last snapshot failed, or it has too few replicas",
        "busy": "the server is running a script",
    }
)
TRANSIENT: Final = frozenset({"loading", "moved", "clusterdown", "busy"})

_BY_ERROR_CODE: Final = {
    "OOM": "full",
    "NOAUTH": "denied",
    "NOPERM": "denied",
    "WRONGPASS": "denied",
    "READONLY": "readonly",
    "LOADING": "loading",
    "MASTERDOWN": "loading",
    "MOVED": "moved",
    "ASK": "moved",
    "TRYAGAIN": "moved",
    "CROSSSLOT": "moved",
    "CLUSTERDOWN": "clusterdown",
    "MISCONF": "misconf",
    "NOREPLICAS": "misconf",
    "BUSY": "busy",
    "UNBLOCKED": "connection",
}
TOPOLOGY: Final = frozenset({"connection", "timeout", "readonly", "moved", "clusterdown", "loading"})
"""Reasons after which the servers are discovered again: the key may be on another one by now."""


class ChunkResult(NamedTuple):
    """The result of one chunk of a put or a get; ``reason`` is empty if none is counted."""

    status: Status
    reason: str = ""


OK: Final = ChunkResult(Status.OK)
ABSENT: Final = ChunkResult(Status.ABSENT)
TORN: Final = ChunkResult(Status.CORRUPT, "torn")
DENIED: Final = ChunkResult(Status.FAILED, "denied")
TIMED_OUT: Final = ChunkResult(Status.FAILED, "timeout")


def result_of(reply: ErrorReply) -> ChunkResult:
    """Return an error reply as the result of a chunk."""
    reason = _BY_ERROR_CODE.get(reply.partition(" ")[0], "error")
    return ChunkResult(Status.REFUSED if reason == "full" else Status.FAILED, reason)


def reason_of(error: BaseException) -> str:
    """Return the reason for an exception of redis-py or of a socket."""
    if isinstance(error, BusyLoadingError):
        return "loading"
    if isinstance(error, AuthenticationError):
        return "denied"
    if isinstance(error, ResponseError):
        return result_of(ErrorReply(error)).reason
    if isinstance(error, TimeoutError):
        return "timeout"
    return "connection" if isinstance(error, ConnectionError | OSError) else "error"
