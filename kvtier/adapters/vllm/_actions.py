"""Executes the actions of clients: as the claim of their request, or on the claim of a session."""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import inf

from kvtier._core.chunks import DEFAULT, LOW
from kvtier._core.messages import MAX_ADDRESSES
from kvtier._core.promotion.waits import Wait
from kvtier._core.requests import Request, Terms
from kvtier._core.shared import PRIMARY
from kvtier._core.tiering import Tiering
from kvtier.adapters.vllm import _hints as hints
from kvtier.adapters.vllm._hints import DEMOTE, FETCH, PIN, PREFETCH, RELEASE, RETAIN, Hint

PREFETCHED_S = 600.0
"""How long chunks that are promoted at once stay by default."""

_Outcome = tuple[str, str]
_DONE: _Outcome = ("accepted", "ok")


class Actions:
    """Executes the actions of requests, and counts their outcomes when the requests end.

    ``peers`` are the addresses of the engines that tiers may ask.
    """

    def __init__(self, core: Tiering, peers: Collection[str], clock: Callable[[], float]) -> None:
        self._core = core
        self._peers = peers
        self._clock = clock
        self.running: dict[str, list[Hint]] = {}  # the hints of running requests, by name

    @property
    def capabilities(self) -> list[tuple[str, str]]:
        """The types of actions that this engine executes, and their versions."""
        return [(name, version) for name, (version, _) in hints.TYPES.items() if not self._lack(name)]

    def execute(self, request: Request, given: list[Hint], own_session: str = "") -> bool:
        """Execute the hints of an arriving request; return whether all chunks of its prompt count.

        ``own_session`` is the id of its session in vLLM.
        """
        if not given:
            return False
        self.running[request.name] = given
        terms = Terms("")
        for hint in given:
            if hint.action is not None and hint.action.block_hashes is not None and hint.type != FETCH:
                hint.outcome, hint.reason = self._execute_part(hint, request, own_session)
            elif hint.action is not None:
                hint.outcome, hint.reason = self._execute(hint, request, terms, own_session)
            if hint.is_cut and hint.outcome == "accepted":
                hint.outcome, hint.reason = "clipped", "limit"
        is_claimed = self._claim(request, terms, f"request {request.name}")
        return is_claimed or request.priority > DEFAULT or bool(request.parts)

    def outcomes(self, request: Request) -> list[Hint]:
        """Return the hints of a running request, with the outcomes as far as they are known."""
        given = self.running.get(request.name, [])
        for hint in given:
            if hint.outcome in ("rejected", "missing"):
                continue
            part, terms = hint.part, (hint.part or request).terms
            has_any = part is None or request.parts[part]
            if hint.type == FETCH and request.places:
                has_any = any(map(request.names, request.places))
            if not has_any:
                hint.outcome, hint.reason = "missing", "blocks"
            elif part is None and hint.reason == "new" and not request.places:
                hint.outcome, hint.reason = "missing", "session"
            elif hint.type == PIN and terms is not None and self._core.claims.is_cut(terms.name):
                hint.outcome, hint.reason = "clipped", "budget"
        return given

    def count_outcomes(self, request: Request) -> None:
        """Count the outcomes of a request's hints when it ends."""
        for hint in self.outcomes(request):
            self._core.shared.counts["hint_actions", hint.type, hint.outcome, hint.reason] += 1
        self.running.pop(request.name, None)

    def _lack(self, kind: str) -> str:
        """Return why no action of a type is executed, in a word of ``HINT_ACTIONS``; empty if it is."""
        shared = self._core.shared
        if kind in (FETCH, PREFETCH, DEMOTE) and not shared.tiers:
            return "no_tier"
        if kind == PREFETCH and shared.windowed:
            return "windows"
        return "budget" if kind == PIN and not shared.limits.pin_budget else ""

    def _claim(self, request: Request, terms: Terms, name: str) -> bool:
        """Begin a request's claim if it has one, under this name if no other was given; return whether."""
        request.priority = LOW if request.releases else request.priority
        terms.name = terms.name or name
        is_claimed = bool(terms.kept_s or terms.next_use_s)
        if is_claimed or terms.releases:
            self._core.claims.start_request(request, terms)
        return is_claimed

    def _execute_part(self, hint: Hint, request: Request, own_session: str) -> _Outcome:
        """Execute an action on blocks, by a part of the request."""
        assert hint.action is not None
        blocks, terms = dict.fromkeys(hint.action.block_hashes or ()), Terms("")
        part = Request(f"{request.name}, blocks {len(request.parts)}", request.tiers, blocks=blocks)
        outcome = self._execute(hint, part, terms, own_session)
        if outcome[0] != "rejected":
            hint.part = part
            self._claim(part, terms, f"request {part.name}")
            self._core.add_part(request, part)
        return outcome

    def _execute(self, hint: Hint, request: Request, terms: Terms, own_session: str) -> _Outcome:
        """Execute an action, or add it to the terms of the request's own prompt."""
        action, kind, claims = hint.action, hint.type, self._core.claims
        assert action is not None
        session = own_session if action.session is True else action.session or ""
        if reason := self._lack(kind):
            return "rejected", reason
        if session and (kind in (FETCH, RETAIN) or (action.block_hashes is not None and kind != PIN)):
            return "rejected", "target"
        if action.tier not in ("", PRIMARY) and kind != PREFETCH:
            return "rejected", "target"
        name = f"session {session}" if session else ""
        is_new = bool(name) and not claims.has(name)
        if isinstance(action, hints.Fetch):
            return self._fetch(action, request)
        if isinstance(action, hints.Retain):
            request.priority, request.priority_s = action.priority, action.ttl_s or inf
            return _DONE
        if kind == RELEASE and name:
            terms.releases = [*terms.releases, name]
            return ("missing", "session") if is_new else _DONE
        if (action.session is True and not name) or (name and terms.name not in ("", name)):
            return "rejected", "session"
        if isinstance(action, hints.Prefetch):
            return self._prefetch(action, request, terms, name)
        terms.name = terms.name or name
        if kind == PIN:
            terms.kept_s = max(terms.kept_s, action.ttl_s or hints.LONGEST_S)
        elif kind == RELEASE:
            request.priority = LOW
        elif name and self._core.shared.windowed:
            return "rejected", "windows"
        else:
            request.releases = True
            terms.next_use_s = terms.next_use_s or (inf if name else 0.0)
        return ("accepted", "new") if is_new else _DONE

    def _fetch(self, action: hints.Fetch, request: Request) -> _Outcome:
        address, wait_s = action.source_control_endpoint.removeprefix("tcp://"), action.wait_s
        allowed_s = min(wait_s, self._core.shared.limits.max_wait_s)
        if action.mode != "copy" or action.no_retain is not None:
            return "rejected", "target"
        if not (address or wait_s) or (address and address not in self._peers):
            return "rejected", "peer"
        if (wait_s and not allowed_s) or (address and len(request.addresses) == MAX_ADDRESSES):
            return "rejected", "limit"
        if address:
            named = None if action.block_hashes is None else dict.fromkeys(action.block_hashes)
            is_first, others = not request.addresses, request.blocks
            request.blocks = named if is_first or named is None or others is None else named | others
            request.addresses += (address,)
        if allowed_s:
            request.wait = Wait(allowed_s)
        return _DONE if allowed_s == wait_s else ("clipped", "limit")

    def _prefetch(self, action: hints.Prefetch, request: Request, terms: Terms, name: str) -> _Outcome:
        tiers, names = request.tiers, [status.name for status in self._core.shared.tiers]
        if action.tier and action.tier not in names:
            return "rejected", "target"
        if action.tier:
            only = frozenset({names.index(action.tier)})
            tiers = only if tiers is None else only & tiers
        if action.next_use_s:
            terms.name, terms.next_use_s, terms.tiers = terms.name or name, action.next_use_s, tiers
            return "deferred", "next_use"
        if not name:  # its lookups promote it
            terms.kept_s = max(terms.kept_s, action.ttl_s)
            return _DONE
        is_known = self._core.claims.promote(name, action.ttl_s or PREFETCHED_S, self._clock(), tiers)
        return _DONE if is_known else ("missing", "session")
