"""Hints of a client about its request, in ``kv_transfer_params`` under the key ``kvtier``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import inf
from typing import Any

from kvtier._core.chunks import DEFAULT, HIGHEST, LOW
from kvtier._core.messages import MAX_ADDRESS, MAX_ADDRESSES
from kvtier._core.prefetch import Prefetches
from kvtier._core.retention import Retention
from kvtier._log import GuardedLogger
from kvtier._telemetry.log_limit import LogLimit
from kvtier.keys import OffloadKey

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
_LEAD_S = 10.0  # from the start of a prefetch to the announced use; half the time if that is less
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

    @property
    def kept_s(self) -> float:
        """Seconds to keep its chunks after its end: no client can pin for ever."""
        return self.ttl_s or _LONGEST_TTL_S

    def name(self, req_id: str) -> str:
        """Return the name for keeping its chunks; a request's name never equals a client's."""
        return f"pin {self.pin}" if self.pin else f"request {req_id}"


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


@dataclass(slots=True)
class _Followed:
    """A request with hints that has not ended."""

    hints: Hints
    tiers: frozenset[int] | None  # tiers that may serve it; None for all
    used: dict[OffloadKey, None] = field(default_factory=dict)  # in the order of its prompt, if needed again


class ClientHints:
    """Follows the hints of requests that have not ended; keeps their chunks, and announces their next use."""

    def __init__(self, retention: Retention, prefetches: Prefetches, clock: Callable[[], float]) -> None:
        self._retention = retention
        self._prefetches = prefetches
        self._clock = clock
        self._reader = HintReader(clock)
        self._followed: dict[str, _Followed] = {}
        self._followed_names: Counter[str] = Counter()  # number of requests that keep chunks under each name

    def begin(self, req_id: str, params: object, tiers: frozenset[int] | None = None) -> Hints:
        """Return the hints of a request that has arrived and may be served from ``tiers``; None for all."""
        self.ended(req_id)  # in case an earlier request of this id has not ended
        hints = self._reader.read(req_id, params)
        if hints.needs_all or hints.release:
            self._followed[req_id] = _Followed(hints, tiers)
        if hints.keeps:
            name = hints.name(req_id)
            self._followed_names[name] += 1
            self._retention.expire(name, inf)  # its time counts from the end of its last request
        if hints.pin:
            self._prefetches.cancel(f"pin {hints.pin}")  # it is back
        return hints

    def loaded(self, req_id: str, keys: Collection[OffloadKey]) -> None:
        """Keep or note chunks that a request loads, if its client wants that."""
        if (used := self._keep(req_id, keys)) is not None:
            used.update(dict.fromkeys(keys))

    def stored(self, req_id: str, keys: Collection[OffloadKey]) -> None:
        """Keep or note chunks that a request has offered to be stored, if its client wants that."""
        if (used := self._keep(req_id, keys)) is not None:
            for key in keys:  # all chunks of the request in prompt order, loaded ones too
                used.pop(key, None)
                used[key] = None

    def _keep(self, req_id: str, keys: Collection[OffloadKey]) -> dict[OffloadKey, None] | None:
        """Keep chunks if the client wants that; return the place to record them if they are needed again."""
        if (followed := self._followed.get(req_id)) is None:
            return None
        if followed.hints.keeps:
            self._retention.keep(followed.hints.name(req_id), keys)
        return followed.used if followed.hints.next_use_s else None

    def ended(self, req_id: str) -> None:
        """Note a request's end: its time starts to count, and its releases take effect."""
        if (followed := self._followed.pop(req_id, None)) is None:
            return
        hints = followed.hints
        if hints.keeps:
            name = hints.name(req_id)
            self._followed_names[name] -= 1
            if not self._followed_names[name]:
                del self._followed_names[name]
                self._retention.expire(name, self._clock() + hints.kept_s)
        if isinstance(hints.release, str):
            name = Hints(pin=hints.release).name(req_id)
            self._retention.release(name)
            self._prefetches.release(name)
        if hints.next_use_s:
            now_s, after_s = self._clock(), hints.next_use_s
            from_s = now_s + max(after_s / 2, after_s - _LEAD_S)
            self._prefetches.announce(
                hints.name(req_id), list(followed.used), from_s, now_s + 2 * after_s, followed.tiers
            )
