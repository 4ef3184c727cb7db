"""What went wrong, in words: from what the client raises to a reason, and to what an operator can do.

The client's own messages are never shown. They repeat what the store says, which may name keys, and URLs,
which may carry a signature. What is taken from them is the HTTP status, the store's error code and the
kind of the failure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from obstore.exceptions import BaseError

REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "throttled": "the store asked for fewer requests (503, 429)",
        "forbidden": "the store refused the credentials, or they may not do that (401, 403)",
        "clock": "the store refused the request's time: this machine's clock is wrong",
        "no_bucket": "the bucket is not there any more",
        "region": "the store sent the request elsewhere: region or endpoint is wrong",
        "tls": "the store's certificate was not accepted, or it does not speak TLS",
        "credentials": "no credentials could be had",
        "server": "the store failed (5xx)",
        "request": "the store did not understand the request (4xx)",
        "conflict": "another request for the same object was under way",
        "max_bytes": "max_bytes is reached",
        "counting": "it is not known yet how many bytes the bucket holds",
        "read_only": "the credentials may read, but not write",
    }
)
"""Words beside ``kvtier.reasons.TRANSFER``."""

TRANSIENT: Final = frozenset({"throttled", "server", "conflict"})
"""Those of them that may be over a moment later."""

_STATUS: Final = re.compile(r"(?:status code|status): (\d{3})")
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_KIND: Final = re.compile(r"kind: (Connect|Timeout|Request|Interrupted|Decode)\b")
_TLS: Final = re.compile(
    r"InvalidCertificate\(\s*(\w*)|invalid peer certificate|corrupt message|InvalidContentType"
)
_TOKENS: Final = re.compile(
    r"token request|/latest/(?:api/token|meta-data)|Credential \{|WebIdentity|Invalid Access Key"
)

_THROTTLES: Final = frozenset({"SlowDown", "ServerBusy", "TooManyRequests", "RequestLimitExceeded"})
_FULL: Final = frozenset({"QuotaExceeded", "InsufficientStorage", "EntityTooLarge", "StorageFull"})
_CLOCK: Final = frozenset({"RequestTimeTooSkewed", "RequestExpired"})
_NO_BUCKET: Final = frozenset({"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"})
_CONFLICT: Final = frozenset({"ConditionalRequestConflict", "OperationAborted"})


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that went wrong.

    Attributes:
        word: the reason that is counted.
        detail: the status and code that the store answered with, or the kind of failure; no secret.
    """

    word: str
    detail: str

    def __str__(self) -> str:
        return f"{self.word} ({self.detail})" if self.detail else self.word


def fault_of(error: BaseException) -> Fault:
    """Say what an exception of the client means."""
    text = str(error)
    status, code = _first(_STATUS, text), _first(_CODE, text)
    if isinstance(error, TimeoutError):
        return Fault("timeout", "")
    if status:
        return Fault(_of_status(int(status), code, text), f"{status} {code}".strip())
    if isinstance(error, FileNotFoundError):
        return Fault("request", "404")
    if isinstance(error, BaseError | OSError | ValueError):
        return _of_transport(text)
    return Fault("error", type(error).__name__)


def _of_status(status: int, code: str, text: str) -> str:
    words = {
        "clock": code in _CLOCK,
        "full": code in _FULL or status == 507,
        "throttled": code in _THROTTLES or status in (429, 503),
        "no_bucket": code in _NO_BUCKET,
        "conflict": code in _CONFLICT,
        "credentials": not code and bool(_TOKENS.search(text)),
        "forbidden": status in (401, 403),
        "region": status in (301, 307, 308),
        "timeout": status == 408,
        "server": status >= 500,
    }
    return next((word for word, applies in words.items() if applies), "request")


def _of_transport(text: str) -> Fault:
    if "incorrectly configured region" in text:
        return Fault("region", "redirect")
    if _TOKENS.search(text):
        return Fault("credentials", "")
    if found := _TLS.search(text):
        return Fault("tls", found[1] or "")
    kind = _first(_KIND, text)
    if kind == "Timeout":
        return Fault("timeout", "")
    if "dns error" in text:
        return Fault("connection", "the name is not known")
    if "ConnectionRefused" in text:
        return Fault("connection", "refused")
    if kind:
        return Fault("connection", kind.lower())
    return Fault("error", "")


def is_conflict(error: Exception) -> bool:
    """Whether an object is said to exist only because another request for it is under way."""
    return _first(_CODE, str(error)) in _CONFLICT


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else ""
