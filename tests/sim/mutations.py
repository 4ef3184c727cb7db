"""Bugs to plant: each replaces a line or two of kvtier with a plausible mistake.

A mutation quotes the code that it replaces, so it fails when that code changes.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType


@dataclass(frozen=True)
class Mutation:
    """A bug.

    Attributes:
        name: the wrong behaviour.
        where: the function, as module:name.
        replace: pieces of its source and their replacements.
    """

    name: str
    where: str
    replace: tuple[tuple[str, str], ...]


MUTATIONS = (
    Mutation(
        "reset_leaves_chunks_to_the_next_engine",
        "kvtier._core.slot_trailers:SlotTrailers.reset",
        (("self._words[_VOID] = _ALL", "pass"),),
    ),
    Mutation(
        "reset_keeps_adopted_chunks",
        "kvtier._core.chunks:ChunkTable.reset",
        (("self.give_up_adopted()", "pass"),),
    ),
    Mutation(
        "adopted_chunks_are_not_verified",
        "kvtier.tiers._adopted:_is_whole",
        (("is seals.Integrity.SOUND", "is not None"),),
    ),
    Mutation(
        "marks_of_the_last_engine_stand",
        "kvtier._core.slot_trailers:SlotTrailers.adopt",
        (('marks[:] = memoryview(bytes(marks.nbytes)).cast("Q")', "pass"),),
    ),
    Mutation(
        "slot_of_an_adopted_chunk_is_free",
        "kvtier._core.chunks:ChunkTable.add_slots",
        (("if slot not in self._adopted_slots", ""),),
    ),
    Mutation(
        "stored_chunk_is_adopted_too",
        "kvtier._core.chunks:ChunkTable._give_up",
        (("[key for key in keys if key in adopted]", "[]"),),
    ),
    Mutation(
        "load_that_a_reset_overtakes_counts",
        "kvtier._manager.handles:Acquired._require_visible",
        (("is not ChunkState.READY", "is ChunkState.ABSENT"),),
    ),
    Mutation(
        "epoch_not_checked",
        "kvtier.tiers._runner:TierRunner._require_usable",
        (("if epoch is not self.supervisor.epoch:", "if False:"),),
    ),
    Mutation(
        "put_does_not_wait_for_the_reset",
        "kvtier.tiers._runner:TierRunner.run",
        (("await epoch.settled.wait()", "pass"),),
    ),
    Mutation(
        "failed_reset_is_not_repeated",
        "kvtier.tiers._supervisor:TierSupervisor._bring_up",
        (
            ("    epoch = self.epoch", "    epoch, self._is_reset = self.epoch, True"),
            ("self._is_reset = self.epoch is epoch", "pass"),
            ("self._restart_reason = str(error)", "pass"),
        ),
    ),
    Mutation(
        "overdue_slots_are_given_on",
        "kvtier._core.promotion.gets:Gets.give_up",
        (
            (
                "self._holds.promoting.difference_update(transfer.chunks)",
                "self._holds.promoting.difference_update(transfer.chunks);"
                "self._shared.table.drop(transfer.chunks); transfer.chunks.clear()",
            ),
        ),
    ),
    Mutation(
        "pin_is_kept_after_a_request",
        "kvtier._core.promotion.holds:Holds._unpin",
        (("self._shared.table.unpin(chunks)", "pass"),),
    ),
    Mutation(
        "chunk_that_lacks_its_front_is_stored",
        "kvtier._device.base:Blocks.whole_chunks",
        (("else -first % blocks_per_chunk", "else 0"),),
    ),
    Mutation(
        "second_hole_is_overlooked",
        "kvtier._device.base:Blocks.whole_chunks",
        (("- size == first", "- size >= first"),),
    ),
    Mutation(
        "hole_in_the_midst_is_closed_up",
        "kvtier._device.base:Blocks.whole_chunks",
        (("count * blocks_per_chunk - size == first % blocks_per_chunk", "size > 0"),),
    ),
    Mutation(
        "chunk_that_was_not_filled_becomes_ready",
        "kvtier._core.tiering:Tiering.drop_unfilled",
        (("self.table.pin(unfilled)", "return"),),
    ),
    Mutation(
        "aborted_store_keeps_its_slots",
        "kvtier._core.tiering:Tiering.abort",
        (("self.table.drop(reservation.chunks)", "pass"),),
    ),
    Mutation(
        "checksum_not_verified",
        "kvtier.tiers._integrity:_damaged",
        (("(integrity := check(trailer, key, view, digest)).is_corrupt", "False"),),
    ),
    Mutation(
        "seal_of_another_chunk_will_do",
        "kvtier.tiers._seal:check",
        (("if sealed.key != key or", "if"),),
    ),
    Mutation(
        "held_while_another_engine_computes",
        "kvtier._core.promotion.holds:Holds.release_awaiting",
        (("for request in self.awaiting:", "for request in ():"),),
    ),
    Mutation(
        "reset_does_not_reach_fetches",
        "kvtier._core.promotion.gets:Gets.reset",
        (("chunk.move(ChunkEvent.DROPPED)", "pass"), ("transfer.waiters.clear()", "pass")),
    ),
    Mutation(
        "reset_does_not_reach_tiers",
        "kvtier._core.tiering:Tiering.reset",
        (("self.shared.commands.append(messages.Reset(tier, self.epoch))", "pass"),),
    ),
    Mutation(
        "reset_forgets_stores_under_way",
        "kvtier._core.chunks:ChunkTable.reset",
        (
            (
                "chunk.move(ChunkEvent.DROPPED)",
                "chunk.state is ChunkState.FILLING or chunk.move(ChunkEvent.DROPPED)",
            ),
        ),
    ),
    Mutation(
        "commit_before_the_copy_has_ended",
        "kvtier._manager.device_copies:DeviceCopies._copy",
        (
            ("await wait_for_end(self.in_flight[copy])", "None"),
            ("self.in_flight.pop(copy).result()", "type('Ended', (), {'error': None})"),
        ),
    ),
    Mutation(
        "deadline_ignored",
        "kvtier._core.promotion.waits:Waits.expire",
        (("request.move(RequestEvent.OVERDUE)", "pass"),),
    ),
    Mutation(
        "tier_deadline_ignored",
        "kvtier.tiers._runner:TierRunner.run",
        (("begun_s + self._deadline_s", "begun_s + 1e9"),),
    ),
    Mutation(
        "pinned_chunks_are_evicted",
        "kvtier._core.chunks:ChunkTable.pin",
        (("order.pin(keys)", "None"),),
    ),
    Mutation(
        "answers_in_the_wrong_order",
        "kvtier.tiers._runner:TierRunner._get",
        (("for status in outcome.statuses", "for status in reversed(outcome.statuses)"),),
    ),
    Mutation(
        "failed_get_lands",
        "kvtier.tiers._runner:TierRunner._get",
        (("if status == Status.OK else", "if status != Status.ABSENT else"),),
    ),
    Mutation(
        "load_released_twice",
        "kvtier._core.tiering:Tiering.release",
        (("self._end(pinned)", "self._end(pinned); self.table.unpin(pinned.chunks)"),),
    ),
    Mutation(
        "load_not_pinned",
        "kvtier._core.tiering:Tiering.acquire",
        (("self.table.pin(chunks)", "pass"),),
    ),
    Mutation(
        "damaged_chunk_not_discarded",
        "kvtier.tiers._runner:TierRunner._resolve_damage",
        (("await self._discard(discarded)", "pass"),),
    ),
    Mutation(
        "damage_not_confirmed",
        "kvtier.tiers._runner:TierRunner._resolve_damage",
        (("is_confirmed=first == second", "is_confirmed=True"),),
    ),
    Mutation(
        "wakeup_lost",
        "kvtier._execution.executor:ExecutorThread._serve",
        (("self._woken = False", "pass"),),
    ),
    Mutation(
        "budget_not_given_back",
        "kvtier._core.promotion.holds:Holds.free_budget",
        (
            (
                "self.promoting.difference_update([chunk for chunk in chunks if not chunk.pins])",
                "pass",
            ),
        ),
    ),
    Mutation(
        "claims_on_blocks_never_end",
        "kvtier._core.tiering:Tiering.close",
        (("self.close(part, now_s)", "pass"),),
    ),
    Mutation(
        "blocks_name_chunks_that_are_gone",
        "kvtier._core.chunks:ChunkTable._hide",
        (("del index[block_of(key)][key]", "pass"),),
    ),
    Mutation(
        "ended_claim_keeps_its_pins",
        "kvtier._core.claims:Claims._remove",
        (("self._shared.table.unpin(unpinned)", "pass"),),
    ),
    Mutation(
        "dropped_chunk_stays_claimed",
        "kvtier._core.claims:Claims.drop_lost",
        (("self._forget(key)", "pass"),),
    ),
    Mutation(
        "running_request_does_not_extend_its_claim",
        "kvtier._core.claims:Claims.end_request",
        (("claim.requests -= 1", "claim.requests = 0"),),
    ),
    Mutation(
        "promoted_ahead_for_ever",
        "kvtier._core.claims:Claims._stop",
        (("self._close_request()", "pass"),),
    ),
    Mutation(
        "backlog_not_given_back",
        "kvtier._core.cascade:Cascades.put_ended",
        (("status.backlog -= len(transfer.chunks)", "pass"),),
    ),
    Mutation(
        "turn_not_given_back",
        "kvtier.tiers._activity:ConcurrencyLimit.__aexit__",
        (("self._semaphore.release()", "exc[0] or self._semaphore.release()"),),
    ),
    Mutation(
        "more_turns_than_there_are",
        "kvtier.tiers._activity:puts_at_once",
        (("max(1, max_concurrency // 2)", "max(1, max_concurrency)"),),
    ),
    Mutation(
        "late_transfers_are_never_over",
        "kvtier._core.tiers.breaker:Breaker.note_end",
        (("self.overdue -= 1", "pass"),),
    ),
    Mutation(
        "breaker_never_closes",
        "kvtier._core.tiers.breaker:Breaker._end_probe",
        (("if health is not TransferHealth.GOOD:", "if True:"),),
    ),
    Mutation(
        "tier_never_comes_back",
        "kvtier.tiers._supervisor:TierSupervisor._come_up",
        (("self._on_change(None)", "pass"),),
    ),
    Mutation(
        "second_attempt_after_a_reset",
        "kvtier.tiers._runner:TierRunner._attempts",
        (("self._require_usable(epoch)", "pass"),),
    ),
    Mutation(
        "cancelled_while_bytes_move",
        "kvtier.tiers._waiting:wait_for_end",
        (("cancelled = error", "raise"),),
    ),
    Mutation(
        "failed_load_is_tried_again",
        "kvtier._core.tiering:Tiering.fail_load",
        (("request.move(RequestEvent.LOAD_FAILED)", "pass"),),
    ),
    Mutation(
        "key_in_two_slots",
        "kvtier._core.promotion.gets:Gets._complete",
        (("and chunk.key not in table.visible", ""),),
    ),
    Mutation(
        "asked_again_for_what_no_tier_has",
        "kvtier._core.promotion.wanted:refresh_wanted",
        (("if absent.isdisjoint(wanted):", "if True:"),),
    ),
    Mutation(
        "brought_behind_a_gap",
        "kvtier._core.promotion.wanted:refresh_wanted",
        (("and group not in gaps", ""),),
    ),
    Mutation(
        "evictions_not_told",
        "kvtier.tiers._runner:TierRunner._post_removed",
        (("self._post(Removed(self.index, known if len(known) <= MOST_REMOVED else ()))", "pass"),),
    ),
)

FLEET_MUTATIONS = (
    Mutation(
        "lease_may_have_run_out",
        "kvtier_nixl.tier:NixlTier._read",
        (("if not peer.release(lease):", "if peer.release(lease) is None:"),),
    ),
    Mutation(
        "reader_that_dies_keeps_its_lease",
        "kvtier_nixl._pool:ChunkPool._expire",
        (("if lease.expires_s > now_s:", "if True:"),),
    ),
    Mutation(
        "holder_serves_after_its_reset",
        "kvtier_nixl.tier:NixlTier.reset",
        (("await self._isolate()", "self._peers and await self._peers.aclose()"),),
    ),
    Mutation(
        "reader_reads_after_its_reset",
        "kvtier_nixl.tier:NixlTier.reset",
        (("await self._isolate()", "self._server and await self._server.aclose()"),),
    ),
    Mutation(
        "stopped_peer_is_waited_for",
        "kvtier_nixl._peers:Peer._ask",
        (("asyncio.timeout(self._timeout_s)", "asyncio.timeout(None)"),),
    ),
    Mutation(
        "lost_peer_is_not_connected_to_again",
        "kvtier_nixl._peers:Peer.close",
        (("self._is_lost.set()", "pass"),),
    ),
    Mutation(
        "late_answer_is_taken_for_the_next",
        "kvtier_nixl._peers:Peer._ask",
        (("raise self._broken(_words(error)) from None", "raise PeerError(_words(error)) from None"),),
    ),
    Mutation(
        "rows_of_a_failed_read_are_lost",
        "kvtier_nixl._agent:Agent.read",
        (("self.free_rows(rows)", "pass"),),
    ),
    Mutation(
        "rows_are_freed_while_a_read_goes_on",
        "kvtier_nixl._agent:Agent.read",
        (("read.is_given_up = True", "self.free_rows(rows); raise"),),
    ),
    Mutation(
        "leased_rows_are_used_again_after_a_discard",
        "kvtier_nixl._pool:ChunkPool.discard",
        (("if self._pins[chunk.row] > 0:", "if False:"),),
    ),
)
"""Bugs of kvtier-nixl that runs of several engines find."""


@contextmanager
def planted(mutation: Mutation) -> Iterator[None]:
    """Plant the bug in kvtier for a while, in every module that imported the function."""
    function = _find(mutation.where)
    sound = function.__code__
    function.__code__ = _mutated(mutation, function)
    try:
        yield
    finally:
        function.__code__ = sound


def _find(where: str) -> FunctionType:
    module, _, path = where.partition(":")
    found: object = importlib.import_module(module)
    for name in path.split("."):
        found = inspect.getattr_static(found, name)
    function = getattr(found, "__func__", found)
    assert isinstance(function, FunctionType), where
    return function


def _mutated(mutation: Mutation, function: FunctionType) -> CodeType:
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in mutation.replace:
        assert source.count(old) == 1, (
            f"{mutation.name}: {mutation.where} has {old!r} {source.count(old)} times"
        )
        source = source.replace(old, new)
    scope: dict[str, FunctionType] = {}
    exec(f"from __future__ import annotations\n{source}", function.__globals__, scope)
    code = scope[function.__name__].__code__
    assert code.co_freevars == function.__code__.co_freevars, mutation.where
    return code
