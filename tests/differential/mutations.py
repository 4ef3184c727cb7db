"""Bugs to be planted where kvtier meets the engine: ``python -m tests.differential --bugs NAME``."""

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
        "request_is_never_closed",
        f"{_MANAGER}.on_request_finished",
        (("self._core.close(request, self._clock())", "pass"),),
    ),
    Mutation(
        "load_is_never_over",
        f"{_MANAGER}.complete_load",
        (("self._driver.end_load(pinned, self._requests.get(req_context.req_id), failed=failed)", "pass"),),
    ),
    Mutation(
        "prompt_is_evicted_for_its_own_tail",
        "kvtier._core.tiering:Tiering._make_room",
        (("self.shared.evict(count, run)", "self.shared.evict(count)"),),
    ),
    Mutation(
        "chunk_with_a_hole_at_its_front_is_stored",
        "kvtier._device.base:Blocks.whole_chunks",
        (("cut = 0 if group in state_groups else -first % blocks_per_chunk", "cut = 0"),),
    ),
    Mutation(
        "session_is_stored_from_earlier_blocks",
        f"{_MANAGER}.on_schedule_end",
        (("if request.is_placed and not TRACKS_BLOCKS:", "if False:"),),
    ),
    Mutation(
        "stores_beside_a_transport_that_it_does_not_see",
        f"{_MANAGER}.on_new_request",
        (('"neighbour" if self._is_blind else None', "None"),),
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
