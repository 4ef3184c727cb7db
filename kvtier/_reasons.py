"""Reasons: the words for misses, drops, refusals and failures. They become metric labels: a fixed set.

A tier can add words to ``TRANSFER`` in ``SecondaryTier.reasons``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

UNKNOWN = "error"
"""The reason under which any undeclared word is counted."""

MISS: Mapping[str, str] = {
    "absent": "no tier has the chunk, or none could return it",
    "deadline": "`request_deadline_s` passed before the tiers answered",
    "budget": "the chunks to promote for the request exceeded `promotion_budget`",
    "starting": "the primary tier is still being populated and had no slot for a promotion",
    "gate": "computing the chunk is quicker than loading it (`load_gate`)",
    "not_arrived": "the request waited for the chunk until `wait_s` had passed, and no tier had it",
    "filter": "the request allows no secondary tier (`kv_load_tiers`), and the primary tier does not have it",
    "load_failed": "a load of the request failed; the engine computes it",
    "device_lost": "a worker's device is lost; nothing is loaded until a restart",
    "audit": "an audit found a damaged chunk; nothing is loaded until a restart",
}
WAITS: Mapping[str, str] = {
    "arrived": "all chunks arrived",
    "in_vain": "`wait_s` passed; the engine computes the rest",
    "gave_up": "early: a get failed, no tier could be asked, `load_gate` chose to compute, or a reset came",
    "aborted": "the request ended while it waited",
}
STORE_REFUSED: Mapping[str, str] = {
    "no_slot": "every slot of the primary tier was pinned or being filled",
    "starting": "the primary tier is still being populated and had no free slot",
    "store_threshold": "the chunk was offered less often than `store_threshold`",
    "reset": "requests ran through the last reset, so the device has blocks from before it; reset again",
    "session": "a session with streamed input continued; vLLM before 0.33 mixes up its blocks",
    "preempted": "the request was preempted, and vLLM does not tell that it has blocks again",
    "neighbour": "another connector may write to the blocks (`MultiConnector`); use `KVTierConnector`",
    "device_lost": "a worker's device is lost; nothing is stored until a restart",
    "audit": "an audit found a damaged chunk; nothing is stored until a restart",
}
DROPPED: Mapping[str, str] = {
    "failed": "the copy failed, or an audit found that it brought other bytes",
    "incomplete": "the engine offered the chunk, but no longer had all of its blocks (sliding windows)",
    "changed": "the engine wrote to the chunk's blocks before their copy had ended",
    "neighbour": "another connector of `MultiConnector` did not fill blocks while the store was in flight",
}
KEEP_REFUSED: Mapping[str, str] = {
    "budget": "kept chunks already take all of `pin_budget`",
    "absent": "the chunk was not stored, or was gone before it could be kept",
    "names": "too many names keep chunks",
}
HINT_ACTIONS: Mapping[str, str] = {
    "ok": "executed as asked",
    "new": "executed; the session begins with this request",
    "next_use": "chunks are promoted shortly before `next_use_s` has passed",
    "limit": "beyond 8,192 blocks, `max_wait_s`, 16 actions or 16 addresses",
    "budget": "`pin_budget` had no room for some chunks, or is 0",
    "no_expiry": "the priority outlasts `ttl_s`: it ends when the chunk leaves host memory",
    "session": "no chunks are claimed under the name, or the request has no session or another one",
    "blocks": "the prompt has none of the blocks",
    "peer": "the source is missing, or in the `peers` of no tier",
    "target": "the action does not take block hashes, a session, this tier or this `mode`",
    "no_tier": "there is no secondary tier",
    "windows": "the model has sliding windows or recurrent states",
    "unknown": "the action or its version is unknown",
    "malformed": "it cannot be read; the log names the field",
}
NO_WORK: Mapping[str, str] = {
    "audit": "an audit found a damaged chunk of the tier; it is disabled until a restart",
    "down": "the tier could not be opened or reset, or its process ended; kvtier retries",
    "unresponsive": "a put (or get) of the tier is past its deadline and still running",
    "breaker_open": "the breaker is open after failures; a probe is sent at intervals",
    "filter": "the request excludes the tier (`kv_load_tiers`)",
    "gate": "computing is quicker than getting chunks from the tier (`load_gate`)",
    "backlog": "the tier's puts already hold their share of slots",
    "back_pressure": "the tier's put queue is too long, or puts slow down its gets",
}
BY_CHOICE: Mapping[str, str] = {
    "not_reused": "the tier's `write_policy` skips chunks that were requested only once",
    "write_budget": "the tier's `write_bytes_per_day` is used up for now",
}
PUT_DROPPED: Mapping[str, str] = {
    **{word: text for word, text in NO_WORK.items() if word not in ("filter", "gate")},
    **BY_CHOICE,
}
SKIPPED: Mapping[str, str] = {
    word: text for word, text in NO_WORK.items() if word not in ("backlog", "back_pressure")
}
BREAKER_OPENED: Mapping[str, str] = {
    "failures": "several in a row have failed",
    "failure_rate": "half of the last 20 failed",
    "overdue": "one passed its deadline",
    "probe": "a probe failed or passed its deadline",
}
RETRY: Mapping[str, str] = {
    "helped": "the retry succeeded",
    "failed": "the retry failed",
    "no_time": "no retry: the deadline was too close",
    "no_budget": "no retry: the budget `retry_share` was used up",
}
POLICY_REPLACED: Mapping[str, str] = {
    "raised": "it raised an exception",
    "not_a_candidate": "it chose a chunk that is pinned or not in the primary tier",
    "too_many": "it chose more chunks than requested",
    "withheld": "it chose fewer chunks than requested, although it had candidates",
}
PROCESS_ENDED: Mapping[str, str] = {
    "killed": "SIGKILL, SIGTERM or similar: out of memory, or an operator",
    "crashed": "it crashed with a signal such as SIGSEGV or SIGABRT",
    "exited": "it exited by itself; see the log",
    "silent": "no heartbeat: the process was stopped, or a tier blocked its event loop",
    "garbled": "it sent an invalid message",
    "not_started": "it could not be started, or was not ready in time",
}
TRANSFER: Mapping[str, str] = {
    "checksum": "the checksum does not match: the bytes are not those that were put",
    "torn": "the chunk is incomplete: its trailer is missing or damaged",
    "foreign": "the bytes belong to another chunk or another cache",
    "full": "the tier has no room",
    "timeout": "the backend did not answer in time",
    "connection": "the backend could not be reached",
    "late": "the deadline passed while the transfer was queued",
    "down": "the tier went down before the transfer started",
    "process": "the tier process ended during the transfer",
    "reset": "a reset came before the transfer ended",
    "cancelled": "the engine was shut down",
    "audit": "an audit found that the chunk changed after it was stored; it was not put",
    UNKNOWN: "anything else; the log has the details",
}


TRANSIENT = frozenset({"timeout", "connection"})
"""Reasons in ``TRANSFER`` that are worth a retry. ``SecondaryTier.transient`` adds a tier's own."""


def word_for(error: BaseException) -> str:
    """Return the reason in ``TRANSFER`` that an exception is counted as."""
    if isinstance(error, TimeoutError):
        return "timeout"
    return "connection" if isinstance(error, ConnectionError) else UNKNOWN


def bounded(counts: Mapping[str, int], words: Collection[str], total: int) -> dict[str, int]:
    """Return counts of reasons that add up to ``total`` and use only ``words``.

    Raises:
        TypeError, ValueError: ``counts`` is no mapping to numbers.
    """
    result: dict[str, int] = {}
    left = total
    for word, count in counts.items():
        taken = min(left, max(0, int(count)))
        if taken:
            known = word if word in words else UNKNOWN
            result[known] = result.get(known, 0) + taken
            left -= taken
    if left:
        result[UNKNOWN] = result.get(UNKNOWN, 0) + left
    return result
