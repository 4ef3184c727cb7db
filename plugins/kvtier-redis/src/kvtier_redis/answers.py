"""What servers say instead of doing what they are told, in the words that are counted."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    ResponseError,
    TimeoutError,
)

from kvtier.tiers.base import Status
from kvtier_redis.wire import Refused

_log = logging.getLogger("kvtier.tiers.redis")

REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "denied": "the server wants a password, or does not let this user do it",
        "readonly": "the server is a replica, and takes no puts",
        "loading": "the server is reading its data from disk",
        "moved": "the cluster keeps the chunk on another server than a moment ago",
        "clusterdown": "the cluster is not complete",
        "misconf": "the server takes no puts because it could not write a snapshot or reach its replicas",
        "busy": "the server is busy with a script",
    }
)
TRANSIENT: Final = frozenset({"loading", "moved", "clusterdown", "busy"})

_WORDS: Final = {
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
_STALE: Final = frozenset({"connection", "timeout", "readonly", "moved", "clusterdown", "loading"})
_QUIET_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class End:
    """How one chunk of a put or a get ended; ``reason`` is empty where it needs none."""

    status: Status
    reason: str = ""


OK: Final = End(Status.OK)
ABSENT: Final = End(Status.ABSENT)
TORN: Final = End(Status.CORRUPT, "torn")
LATE: Final = End(Status.FAILED, "timeout")


def end_of(refused: Refused) -> End:
    """Say a server's refusal as the end of a chunk."""
    word = _WORDS.get(refused.partition(" ")[0], "error")
    return End(Status.REFUSED if word == "full" else Status.FAILED, word)


def word_for(error: BaseException) -> str:
    """Say in one word why a connection could not be had or broke."""
    if isinstance(error, BusyLoadingError):
        return "loading"
    if isinstance(error, AuthenticationError):
        return "denied"
    if isinstance(error, ResponseError):
        return end_of(Refused(str(error))).reason
    if isinstance(error, TimeoutError):
        return "timeout"
    return "connection" if isinstance(error, ConnectionError | OSError) else "error"


def means_another_server(word: str) -> bool:
    """Whether a reason may mean that the chunk's server is another one by now."""
    return word in _STALE


def is_about_trust(error: BaseException) -> bool:
    """Whether TLS did not trust the server."""
    return "CERTIFICATE_VERIFY_FAILED" in str(error) or isinstance(error, ssl.SSLCertVerificationError)


class Complaints:
    """Logs what went wrong, each kind of it once a minute."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._quiet_until: dict[str, float] = {}

    def note(self, reason: str, text: object) -> None:
        """Log one that did not end well."""
        now = time.monotonic()
        if now >= self._quiet_until.get(reason, 0.0):
            self._quiet_until[reason] = now + _QUIET_S
            _log.warning("tier %s: %s: %s", self._tier, reason, text)
