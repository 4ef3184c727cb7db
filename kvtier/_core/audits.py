"""Audits: the end of a tier, or of all of them, after a chunk was found damaged."""

from __future__ import annotations

from kvtier._core.chunks import Chunk
from kvtier._core.shared import PRIMARY, Notice, SharedState
from kvtier._core.states import ChunkState


def disable(shared: SharedState, tier: int | None, where: str) -> list[Chunk]:
    """Use a tier no more, all if None; return the chunks that came from it, pinned, to be dropped.

    ``where`` is for the log: which chunk it was, and when the damage was noticed.
    """
    table, name = shared.table, PRIMARY if tier is None else shared.tiers[tier].name
    if table.trailers is not None:
        table.trailers.reset()  # evicted and loaded chunks lose theirs, too
    shared.counts["audit_failed", name] += 1
    for index, status in enumerate(shared.tiers):
        if tier in (None, index) and not status.failed_audit:
            status.failed_audit = True
            shared.kv_events.clear(index)
            if status.in_place:
                table.give_up_adopted()
    what = "nothing is stored or loaded" if tier is None else "it is not used"
    text = f"an audit has found a chunk damaged, {where}: {what} any more until a restart"
    shared.notices.append(Notice(f"tier {name}", text))
    given = [chunk for chunk in table.all if chunk.state is ChunkState.READY and tier in (None, chunk.origin)]
    table.pin(given)
    return given
