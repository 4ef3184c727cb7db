"""Hints of a client about its request, in ``kv_transfer_params`` under the key ``kvtier``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvtier._core.chunks import DEFAULT, HIGHEST, LOW
from kvtier._core.messages import MAX_ADDRESS, MAX_ADDRESSES
from kvtier._core.requests import Terms
from kvtier._log import GuardedLogger
from kvtier._telemetry.log_limit import LogLimit

logger = GuardedLogger("kvtier.vllm")

PARAMS = "kvtier"
"""The key of kvtier's part of ``kv_transfer_params``."""

EXPLAINED = "explained"
"""The key, below ``PARAMS``, of the answer to ``explain`` in a response. It may come back as a hint: a router
hands the parameters of a prefill engine's response to a decode engine."""

FROM = "from"
"""The key of the addresses of engines that have the chunks."""

_LONGEST_TTL_S = 86_400
_LONGEST_NAME = 128
_WARN_EVERY_S = 30.0
_SHOWN = 80
_SHOWN_BELOW = 10**12


@dataclass(frozen=True, slots=True)
class Hints:
    """The hints of one request."""

    explain: bool = False  # log which parts of its prompt were found
    ttl_s: float = 0.0  # keep its chunks in the primary tier this long after its end
    pin: str = ""  # keep them under this name, until its release or ``ttl_s`` after its last request
    release: str | bool = False  # name to release at the request's end; True: its own chunks
    wait_s: float = 0.0  # wait for chunks that no tier has yet: another engine computes them
    addresses: tuple[str, ...] = ()  # "from": addresses where that engine serves chunks
    next_use_s: float = 0.0  # from its end until its chunks are needed again; 0 if unknown
    priority: int = DEFAULT  # of its chunks in the primary tier: lower ones are evicted first

    @property
    def keeps(self) -> bool:
        """Whether chunks are kept from now on. With a next use, a pin only names them."""
        return bool(self.ttl_s or (self.pin and not self.next_use_s))

    @property
    def needs_all(self) -> bool:
        """Whether all chunks of the request count, including those that it does not compute."""
        return self.keeps or bool(self.next_use_s) or self.priority > DEFAULT

    def terms(self, req_id: str) -> Terms | None:
        """Return what the request claims; no client can claim for ever, or under the name of a request."""
        releases = f"pin {self.release}" if isinstance(self.release, str) else ""
        if not (self.keeps or self.pin or self.next_use_s or releases):
            return None
        name = f"pin {self.pin}" if self.pin else f"request {req_id}"
        kept_s = (self.ttl_s or _LONGEST_TTL_S) if self.keeps else 0.0
        return Terms(name, kept_s, self.next_use_s, releases)


NO_HINTS = Hints()


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _LONGEST_TTL_S


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_NAME


def _are_addresses(value: object) -> bool:
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MAX_ADDRESSES:
        return False
    return all(isinstance(it, str) and 0 < len(it) <= MAX_ADDRESS and it.isascii() for it in value)


def _shown(value: object) -> str:
    """Return a number or a short text, otherwise the type: nested values and large integers are long."""
    is_short = isinstance(value, int | float) and abs(value) < _SHOWN_BELOW
    is_short = is_short or (isinstance(value, str) and len(value) < _SHOWN)
    return repr(value) if is_short else type(value).__name__


_A_TIME = f"a number of seconds above 0 and up to {_LONGEST_TTL_S}"
_CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    "explain": (lambda value: isinstance(value, bool), "true or false"),
    "ttl_s": (_is_time, _A_TIME),
    "pin": (_is_name, f"a name of 1 to {_LONGEST_NAME} characters"),
    "release": (lambda it: it is True or _is_name(it), f"true or a name of 1 to {_LONGEST_NAME} characters"),
    "wait_s": (_is_time, _A_TIME),
    FROM: (_are_addresses, f"a list of 1 to {MAX_ADDRESSES} addresses such as 10.0.0.1:18570"),
    "next_use_s": (_is_time, _A_TIME),
    "priority": (lambda it: type(it) is int and LOW <= it <= HIGHEST, f"an integer from {LOW} to {HIGHEST}"),
}


def is_prefill(params: object) -> bool:
    """Return whether another engine decodes the prompt, as vLLM tells its P/D connectors."""
    return isinstance(params, dict) and params.get("do_remote_decode") is True


class HintReader:
    """Reads hints. Wrong ones are ignored, with a rate-limited warning: a client cannot flood the log."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._log_limit = LogLimit(_WARN_EVERY_S)

    def read(self, req_id: str, params: object) -> Hints:
        """Return the hints among a request's ``kv_transfer_params``."""
        ours: Any = params.get(PARAMS) if isinstance(params, dict) else None
        if ours is None:
            return NO_HINTS
        if not isinstance(ours, dict):
            self._warn(req_id, f"it must be an object, not {type(ours).__name__}")
            return NO_HINTS
        unknown = (key for key in ours if key not in _CHECKS and key != EXPLAINED)
        if (first := next(unknown, None)) is not None:
            self._warn(req_id, f"unknown key {_shown(first)}")
        good = {}
        for key, (is_good, wanted) in _CHECKS.items():
            if key in ours and is_good(ours[key]):
                good[key] = ours[key]
            elif key in ours:
                self._warn(req_id, f"{key} must be {wanted}, not {_shown(ours[key])}")
        addresses = tuple(good.pop(FROM, ()))
        return Hints(addresses=addresses, **good)

    def _warn(self, req_id: str, problem: str) -> None:
        added = self._log_limit.allow("params", self._clock())
        if added is not None:
            logger.warning(
                'request %r: kv_transfer_params["%s"] ignored in part or whole: %s; known keys: %s%s',
                req_id,
                PARAMS,
                problem,
                ", ".join(_CHECKS),
                added,
            )
