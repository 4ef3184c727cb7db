"""Bugs to plant where kvtier meets the engine: ``python -m tests.differential --bugs NAME``."""

from __future__ import annotations

from tests.sim.mutations import Mutation

_MANAGER = "kvtier.adapters.vllm._manager:KVTierManager"
_WORKER = "kvtier.adapters.vllm._worker"

MUTATIONS = (
    Mutation(
        "chunk_is_entered_at_its_first_block",
        "kvtier._device.plan:_Group.pairs",
        (("first % per_chunk, first % per_chunk + len(ids)", "0, len(ids)"),),
    ),
    Mutation(
        "groups_share_slots",
        "kvtier._device.plan:CopyPlanner._pairs",
        (("first_slot += count", "pass"),),
    ),
    Mutation(
        "neighbours_in_the_tensor_only",
        "kvtier._device.plan:_Pages._run_starts",
        (("places[1:] - places[:-1] != 1", "False"),),
    ),
    Mutation(
        "half_of_a_page_is_copied",
        f"{_WORKER}:as_kv_caches",
        (("ref.page_size_bytes,", "ref.page_size_bytes // 2,"),),
    ),
    Mutation(
        "load_in_the_wrong_order",
        f"{_WORKER}:KVTierWorker.submit_load",
        (("job_id, slots.slots,", "job_id, slots.slots[::-1],"),),
    ),
    Mutation(
        "stores_are_not_waited_for",
        f"{_WORKER}:KVTierWorker.wait",
        (("self._engine.wait(job_ids)", "pass"),),
    ),
    Mutation(
        "store_that_was_left_out_is_committed",
        f"{_MANAGER}._end_store",
        (("marks = self._workers.take_marks(reservation.slots)", "marks = {}"),),
    ),
    Mutation(
        "reset_forgets_the_slots_of_its_copies",
        f"{_MANAGER}.reset_cache",
        (("if self._stores or self._loads:", "if False:"),),
    ),
    Mutation(
        "reset_hides_no_chunk",
        f"{_MANAGER}.reset_cache",
        (("self._driver.reset()", "pass"),),
    ),
    Mutation(
        "new_weights_hide_no_chunk",
        f"{_MANAGER}.on_new_weights",
        (("self._driver.reset()", "pass"),),
    ),
    Mutation(
        "request_is_never_closed",
        f"{_MANAGER}.on_request_finished",
        (("self.core.close(request, self._clock())", "pass"),),
    ),
    Mutation(
        "load_is_never_over",
        f"{_MANAGER}.complete_load",
        (("self._driver.end_load(pinned, self.requests.get(req_context.req_id), failed=failed)", "pass"),),
    ),
    Mutation(
        "prompt_is_evicted_for_its_own_tail",
        "kvtier._core.tiering:Tiering.reserve",
        (("self.shared.evict(short, run)", "self.shared.evict(short)"),),
    ),
    Mutation(
        "chunk_with_a_hole_at_its_front_is_stored",
        "kvtier._device.base:Blocks.whole_chunks",
        (("cut = 0 if group in state_groups else -first % blocks_per_chunk", "cut = 0"),),
    ),
    Mutation(
        "session_is_stored_from_earlier_blocks",
        f"{_MANAGER}.on_schedule_end",
        (("appends=not TRACKS_BLOCKS", "appends=False"),),
    ),
    Mutation(
        "stores_beside_a_transport_that_it_does_not_see",
        f"{_MANAGER}._store_refusal",
        (('"neighbour" if self._engine.is_blind else None', "None"),),
    ),
    Mutation(
        "eviction_is_not_announced",
        "kvtier._core.shared:SharedState.evict",
        (("self.kv_events.removed(keys)", "pass"),),
    ),
    Mutation(
        "dropped_puts_are_not_counted",
        "kvtier._core.cascade:Cascades._admit",
        (("if room < len(chosen) and is_new:", "if False:"),),
    ),
)

OF_MANAGERS = (
    Mutation(
        "namespace_is_ignored",
        "kvtier._build:_with_settings",
        (("fields.setdefault(", "fields.get("),),
    ),
    Mutation(
        "layout_is_no_part_of_the_identity",
        "kvtier._build:_with_settings",
        (("if layout.blocks_per_chunk > 1 or len(layout.page_bytes) > 1:", "if False:"),),
    ),
    Mutation(
        "pages_of_other_workers_are_taken",
        "kvtier._build:open_manager",
        (("if not all(ref.is_whole for ref in refs):", "if False:"),),
    ),
    Mutation(
        "kept_memory_is_ignored",
        "kvtier._build:open_manager",
        (("for name in _OF_VLLM if", "for name in () if"),),
    ),
    Mutation(
        "reasons_of_any_length",
        "kvtier.tiers._registry:_problem",
        (("if not isinstance(reasons, Mapping) or not all(map(_is_word, reasons)):", "if False:"),),
    ),
    Mutation(
        "lookup_keys_can_be_reordered",
        "kvtier.tiers._runner:TierRunner._find",
        (("keys, addresses = tuple(command.keys)", "keys, addresses = command.keys"),),
    ),
    Mutation(
        "keys_of_a_batch_can_be_reordered",
        "kvtier.tiers._base:Batch.__init__",
        (("self.keys = tuple(keys)", "self.keys = list(keys)"),),
    ),
    Mutation(
        "slots_of_a_batch_can_be_reordered",
        "kvtier.tiers._base:Batch.__init__",
        (("self.slots = tuple(slots)", "self.slots = list(slots)"),),
    ),
    Mutation(
        "views_of_a_put_can_be_written",
        "kvtier.tiers._runner:TierRunner._put",
        (("is_put=True", "is_put=False"),),
    ),
    Mutation(
        "outcome_of_any_length",
        "kvtier.tiers._runner:TierRunner._complete",
        (("if len(statuses) != count:", "if False:"),),
    ),
    Mutation(
        "known_answers_of_any_length",
        "kvtier.tiers._runner:TierRunner._find",
        (("if len(found) != len(keys):", "if False:"),),
    ),
    Mutation(
        "words_of_a_loss_are_not_checked",
        "kvtier.tiers._runner:TierRunner._note_lost",
        (("text = self._words(TierError(why))", "text = why"),),
    ),
    Mutation(
        "policy_evicts_pinned_chunks",
        "kvtier._core.chunks:ChunkTable._evict",
        (("or chunk.pins", ""),),
    ),
    Mutation(
        "slots_are_free_while_a_view_is_left",
        "kvtier._manager.manager:TieringManager._filling",
        (("if not is_used and (written is None or not written._used_views):", "if not is_used:"),),
    ),
    Mutation(
        "cancelled_copy_is_not_waited_for",
        "kvtier._manager.device_copies:DeviceCopies._copy",
        (
            (
                "cancelled = await wait_for_end(self.in_flight[copy])",
                "cancelled = await self.in_flight[copy] and None",
            ),
        ),
    ),
)
"""Bugs at the interfaces to programs, tiers and policies, for ``tests.differential.managers``."""
