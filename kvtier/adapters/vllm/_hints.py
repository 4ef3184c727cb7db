"""Hints of clients: envelopes of actions, and short forms in ``kv_transfer_params``, read as typed actions.

Nothing behind this module knows which form an action had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from msgspec import Meta, MsgspecError, Struct, convert, field

from kvtier._core.chunks import DEFAULT, HIGHEST, LOW
from kvtier._core.messages import MAX_ADDRESS, MAX_ADDRESSES
from kvtier._core.requests import Request
from kvtier._log import GuardedLogger, LogLimit

logger = GuardedLogger("kvtier.vllm")

PARAMS: Final = "kvtier"
"""The key of kvtier's part of ``kv_transfer_params``."""

EXPLAINED, OUTCOMES = "explained", "outcomes"
"""The keys, below ``PARAMS``, of answers in a response. They may come back as hints: a router hands the
parameters of a prefill engine's response to a decode engine."""

FROM: Final = "from"
"""The key of the addresses of engines that have the chunks."""

PROTOCOL: Final = "0.1"
MOST_ACTIONS: Final = 16
MOST_BLOCKS: Final = 8192
LONGEST_S: Final = 86_400.0

_WARN_EVERY_S = 30.0
_SHOWN = 200
_UNREADABLE = (MsgspecError, ValueError, TypeError, RecursionError)

_Word = Annotated[str, Meta(max_length=128, pattern="^[^\ud800-\udfff]*$")]  # vLLM could not send others
Name = Annotated[str, Meta(min_length=1, max_length=128, pattern="^[^\ud800-\udfff]*$")]
Seconds = Annotated[float, Meta(gt=0, le=LONGEST_S)]
Priority = Annotated[int, Meta(ge=LOW, le=HIGHEST)]
Address = Annotated[str, Meta(max_length=MAX_ADDRESS, pattern="^[!-~]+$")]
Hash = Annotated[int, Meta(ge=0)]


class Action(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An action on the chunks of a request's own prompt, of a session, or of blocks."""

    session: Name | bool = False  # its name; true: the session that vLLM knows the request by
    block_hashes: list[Hash] | None = None  # the last 64 bits of the blocks' hashes; None for all
    tier: _Word = ""
    ttl_s: Seconds = 0.0  # 0: the default of the type


class Fetch(Action, frozen=True, forbid_unknown_fields=False):
    """The engine at an address has the chunks; or some engine will, within ``wait_s``."""

    source_control_endpoint: Address = ""
    mode: _Word = "copy"
    no_retain: Any = None
    wait_s: Seconds = 0.0


class Prefetch(Action, frozen=True):
    """The chunks are needed again, after ``next_use_s`` or at once."""

    next_use_s: Seconds = 0.0


class Retain(Action, frozen=True):
    """Chunks of lower priority leave host memory first."""

    priority: Priority = DEFAULT


FETCH, PREFETCH, DEMOTE, PIN = "kv.fetch", "kv.prefetch", "kv.demote", "kv.pin"
RETAIN, RELEASE = "kv.retain", "kv.release"
TYPES: Final[Mapping[str, tuple[str, type[Action]]]] = {
    FETCH: ("1.0", Fetch),
    PREFETCH: ("0.1", Prefetch),
    DEMOTE: ("0.1", Action),
    PIN: ("0.1", Action),
    RETAIN: ("0.1", Retain),
    RELEASE: ("0.1", Action),
}
"""The version and the payload of each type of action."""

_SHORT: Final[Mapping[str, Any]] = {
    "explain": bool,
    "ttl_s": Seconds,
    "pin": Name,
    "release": Name | bool,
    "wait_s": Seconds,
    FROM: Annotated[list[Address], Meta(min_length=1, max_length=MAX_ADDRESSES)],
    "next_use_s": Seconds,
    "priority": Priority,
}
_ANSWERS = ("hints", EXPLAINED, OUTCOMES)


@dataclass(slots=True)
class Hint:
    """An action that a client asks for, and its outcome."""

    type: str = "other"
    action: Action | None = None  # None if it cannot be read
    action_id: str = ""  # empty for a short form
    is_cut: bool = False  # to a bound
    outcome: str = "rejected"  # or accepted, clipped, deferred, missing
    reason: str = "malformed"  # in a word of ``reasons.HINT_ACTIONS``
    part: Request | None = None  # uses the chunks of its blocks, if it has any


class _Envelope(Struct):
    actions: list[Any]
    protocol_version: _Word


class _Raw(Struct):
    action_type: _Word
    action_version: _Word
    action_id: _Word = ""
    payload: dict[str, Any] = field(default_factory=dict)


def is_prefill(params: object) -> bool:
    """Return whether another engine decodes the prompt, as vLLM tells its P/D connectors."""
    return isinstance(params, dict) and params.get("do_remote_decode") is True


class HintReader:
    """Reads hints. Wrong ones are ignored, with a rate-limited warning: a client cannot flood the log."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._log_limit = LogLimit(_WARN_EVERY_S)

    def read(self, req_id: str, params: object, envelope: object = None) -> tuple[bool, list[Hint]]:
        """Return whether a request is to be explained, and the hints of its three places and short forms."""
        given = params if isinstance(params, dict) else {}
        ours = given.get(PARAMS, {})
        if not isinstance(ours, dict):
            if ours is not None:
                self._warn(req_id, PARAMS, f"it must be an object, not {type(ours).__name__}")
            ours = {}
        hints: list[Hint] = []
        places = {"kv_hints": envelope, "kv_hint": given.get("kv_hint"), "kvtier.hints": ours.get("hints")}
        for place, found in places.items():
            if found is not None:
                hints += self._unpack(req_id, place, found, MOST_ACTIONS - len(hints))
        short = self._read_short(req_id, ours) if ours else {}
        return short.get("explain", False), hints + _translated(short)

    def _unpack(self, req_id: str, place: str, found: object, most: int) -> list[Hint]:
        """Return the hints in an envelope; one stands for all beyond the bound."""
        try:
            envelope = convert(found, _Envelope, from_attributes=True)
        except _UNREADABLE as error:
            self._warn(req_id, place, error)
            return [Hint()]
        is_known = envelope.protocol_version == PROTOCOL
        hints: list[Hint] = []
        left = MOST_BLOCKS  # for all actions: names take time of the engine's steps
        for raw in envelope.actions[: max(0, most)]:
            hints.append(self._read(req_id, place, raw, is_known, left))
            left -= len((hints[-1].action or Action()).block_hashes or ())
        return hints if len(hints) == len(envelope.actions) else [*hints, Hint(reason="limit")]

    def _read(self, req_id: str, place: str, found: object, is_known: bool, most_blocks: int) -> Hint:
        hint = Hint()
        try:
            raw = convert(found, _Raw, from_attributes=True)
            hint.action_id = raw.action_id
            if raw.action_type in TYPES:
                hint.type = raw.action_type
            version, payload = TYPES.get(hint.type, ("", Action))
            if raw.action_version != version or not is_known:
                hint.reason = "unknown"
                return hint
            blocks = raw.payload.get("block_hashes")
            if isinstance(blocks, list) and len(blocks) > most_blocks:
                raw.payload = {**raw.payload, "block_hashes": blocks[:most_blocks]}
                hint.is_cut = True
            hint.action = convert(raw.payload, payload)
        except _UNREADABLE as error:
            self._warn(req_id, f"{place}, {hint.type}", error)
        return hint

    def _read_short(self, req_id: str, ours: dict[Any, Any]) -> dict[str, Any]:
        """Return the valid short forms."""
        unknown = (key for key in ours if key not in _SHORT and key not in _ANSWERS)
        if (key := next(unknown, None)) is not None:
            shown = key[:_SHOWN] if isinstance(key, str) else type(key).__name__
            self._warn(req_id, PARAMS, f"unknown key {shown}; known keys: {', '.join(_SHORT)}, hints")
        good: dict[str, Any] = {}
        for key, kind in _SHORT.items():
            try:
                if key in ours:
                    good[key] = convert(ours[key], kind)
            except _UNREADABLE as error:
                self._warn(req_id, f"{PARAMS}.{key}", error)
        return good

    def _warn(self, req_id: str, place: str, problem: object) -> None:
        added = self._log_limit.allow("params", self._clock())
        if added is not None:
            text = ascii(str(problem)[:_SHOWN])
            logger.warning("request %r: hints ignored in %s: %s%s", req_id, place, text, added)


def _translated(short: Mapping[str, Any]) -> list[Hint]:
    """Return the actions that short forms stand for."""
    hints: list[Hint] = []
    name, ttl_s, next_use_s = short.get("pin", False), short.get("ttl_s", 0.0), short.get("next_use_s", 0.0)
    if ttl_s or (name and not next_use_s):
        hints.append(Hint(PIN, Action(session=name, ttl_s=ttl_s)))
    if next_use_s:
        hints.append(Hint(PREFETCH, Prefetch(session=name, next_use_s=next_use_s)))
    if release := short.get("release"):
        hints.append(Hint(DEMOTE, Action()) if release is True else Hint(RELEASE, Action(session=release)))
    if "priority" in short:
        hints.append(Hint(RETAIN, Retain(priority=short["priority"])))
    hints += [Hint(FETCH, Fetch(source_control_endpoint=address)) for address in short.get(FROM, ())]
    if "wait_s" in short:
        hints.append(Hint(FETCH, Fetch(wait_s=short["wait_s"])))
    return hints
