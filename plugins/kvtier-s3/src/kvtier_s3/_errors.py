"""Exceptions of obstore, classified into reasons.

The exceptions' own messages are never shown, because they repeat the store's text, which may name keys, and
URLs, which may contain a signature. Only the HTTP status, the store's error code and the kind of failure are
used.
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
        "throttled": "the store limits the request rate (503, 429)",
        "forbidden": "the store rejected the credentials, or they lack a permission (401, 403)",
        "clock": "the store rejected the request's time: this machine's clock is wrong",
        "no_bucket": "the bucket does not exist",
        "region": "the store redirected the request: region or endpoint is wrong",
        "tls": "the store's certificate is not trusted, or it does not speak TLS",
        "credentials": "no credentials were found",
        "server": "the store failed (5xx)",
        "request": "the store rejected the request (4xx)",
        "conflict": "another request for the same object was in progress",
        "max_bytes": "max_bytes is reached",
        "counting": "the bytes in the bucket are not counted yet",
        "read_only": "the credentials allow reading only",
    }
)
"""Reasons in addition to ``kvtier._reasons.TRANSFER``."""

TRANSIENT: Final = frozenset({"throttled", "server", "conflict"})
"""Those of them that may be over a moment later."""

RENEWING: Final = frozenset({"timeout", "forbidden", "credentials", "tls"})
"""Reasons to replace the client, which keeps credentials, authorities and dead connections."""

_STATUS: Final = re.compile(r"(?:status code|status): (\d{3})")
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_KIND: Final = re.compile(r"kind: (Connect|Timeout|Request|Interrupted|Decode)\b")
_TLS: Final = re.compile(
    r"InvalidCertificate\(\s*(\w*)|invalid peer certificate|corrupt message|InvalidContentType"
)
_TOKENS: Final = re.compile(
    r"token request|/latest/(?:api/token|meta-data)|Credential \{|WebIdentity|Invalid Access Key"
    r"|External AWS credential provider"
)

_THROTTLES: Final = frozenset({"SlowDown", "ServerBusy", "TooManyRequests", "RequestLimitExceeded"})
_FULL: Final = frozenset({"QuotaExceeded", "InsufficientStorage", "EntityTooLarge", "StorageFull"})
_CLOCK: Final = frozenset({"RequestTimeTooSkewed", "RequestExpired"})
_NO_BUCKET: Final = frozenset({"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"})
_CONFLICT: Final = frozenset({"ConditionalRequestConflict", "OperationAborted"})


@dataclass(frozen=True, slots=True)
class Failure:
    """A classified exception.

    Attributes:
        reason: the reason that is counted.
        detail: the store's status and error code, or the kind of failure; no secret.
    """

    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


def classify(error: BaseException) -> Failure:
    """Return the classification of an exception of obstore."""
    text = str(error)
    status, code = _first(_STATUS, text), _first(_CODE, text)
    if isinstance(error, TimeoutError):
        return Failure("timeout")
    if status:
        return Failure(_of_status(int(status), code, text), f"{status} {code}".strip())
    if isinstance(error, FileNotFoundError):
        return Failure("request", "404")
    if isinstance(error, BaseError | OSError | ValueError):
        return _of_transport(text)
    return Failure("error", type(error).__name__)


def is_conflict(error: Exception) -> bool:
    """Return whether an object exists only because another request for it is in progress."""
    return _first(_CODE, str(error)) in _CONFLICT


def _of_status(status: int, code: str, text: str) -> str:
    reasons = {
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
    return next((reason for reason, applies in reasons.items() if applies), "request")


def _of_transport(text: str) -> Failure:
    if "incorrectly configured region" in text:
        return Failure("region", "redirect")
    if _TOKENS.search(text):
        return Failure("credentials")
    if found := _TLS.search(text):
        return Failure("tls", found[1] or "")
    kind = _first(_KIND, text)
    if kind == "Timeout":
        return Failure("timeout")
    if "dns error" in text:
        return Failure("connection", "unknown host name")
    if "ConnectionRefused" in text:
        return Failure("connection", "refused")
    return Failure("connection", kind.lower()) if kind else Failure("error")


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else ""
