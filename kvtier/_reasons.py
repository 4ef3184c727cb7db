"""The words that say why something did not happen. They become labels of metrics, so they are few and known.

A tier may have words of its own beside ``TRANSFER``; it names them in ``SecondaryTier.reasons``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

UNKNOWN = "error"
"""What every other word is counted as. The log has the details."""

MISS: Mapping[str, str] = {
    "absent": "no tier has the chunk, or could give it",
    "deadline": "the request's deadline passed before the tiers answered",
    "budget": "the chunks to be brought for a request did not fit into the promotion budget",
    "starting": "the primary tier still gets its memory: there was no room yet for the chunks to be brought",
    "filter": "the request may be served from the primary tier alone, which does not have it",
    "load_failed": "a load of the request has failed: it is computed",
    "device_lost": "a worker's device is lost: nothing is loaded any more",
    "audit": "an audit has found a damaged chunk: nothing is loaded any more",
}
STORE_REFUSED: Mapping[str, str] = {
    "no_slot": "every slot of the primary tier was pinned or being filled",
    "starting": "the primary tier still gets its memory: no slot of it was free yet",
    "store_threshold": "the chunk was not offered often enough yet",
    "audit": "an audit has found a damaged chunk: nothing is stored any more",
}
NO_WORK: Mapping[str, str] = {
    "audit": "the tier is not used any more: an audit has found a chunk of it damaged",
    "down": "the tier could not be opened or reset, or its process has ended; that is tried again",
    "unresponsive": "a put (or a get) of the tier has passed its deadline and has not ended",
    "breaker_open": "the tier's puts (or gets) have failed; one of them is let through now and then",
    "filter": "the request may not use the tier",
    "backlog": "the tier's puts hold as many slots as they may",
    "back_pressure": "the tier's puts would take too long, or have slowed down its gets",
}
PUT_DROPPED: Mapping[str, str] = {word: text for word, text in NO_WORK.items() if word != "filter"}
SKIPPED: Mapping[str, str] = {
    word: text for word, text in NO_WORK.items() if word not in ("backlog", "back_pressure")
}
BREAKER_OPENED: Mapping[str, str] = {
    "failures": "several in a row have failed",
    "failure_rate": "too many of the last ones have failed",
    "overdue": "one has passed its deadline",
    "probe": "the one that was let through has failed, or passed its deadline",
}
RETRY: Mapping[str, str] = {
    "helped": "the second attempt went well",
    "failed": "the second attempt failed, too",
    "no_time": "there was no second attempt: the deadline was too near",
    "no_budget": "there was no second attempt: there have been as many lately as there may be",
}
POLICY_REPLACED: Mapping[str, str] = {
    "raised": "it raised an exception",
    "not_a_candidate": "it chose a chunk that is in use or not there",
    "too_many": "it chose more chunks than it was asked for",
    "withheld": "it chose fewer chunks than it was asked for and has",
}
PROCESS_ENDED: Mapping[str, str] = {
    "killed": "somebody has killed it: the system, where memory ran out, or a person",
    "crashed": "a signal that a program gets for its own fault, such as SIGSEGV or SIGABRT",
    "exited": "it has ended by itself; the log has why",
    "silent": "its event loop has not run for too long: it was stopped, or a tier has blocked it",
    "garbled": "it has said something that cannot be understood",
    "not_started": "it could not be started, or was not ready in time",
}
TRANSFER: Mapping[str, str] = {
    "checksum": "the bytes are not those that were put",
    "torn": "the chunk is not whole: its trailer is missing or damaged",
    "foreign": "the bytes are another chunk's, or another cache's",
    "full": "the tier has no room",
    "timeout": "the tier's backend did not answer in time",
    "connection": "the tier's backend could not be reached",
    "late": "the deadline passed before the transfer's turn came",
    "down": "the tier was given up before the transfer began",
    "process": "the process of the tiers has ended meanwhile",
    "reset": "a reset came before the transfer began or ended",
    "cancelled": "the engine was shut down",
    "audit": "an audit has found that it is not what was stored any more; it was not put",
    UNKNOWN: "anything else; the log has the details",
}


TRANSIENT = frozenset({"timeout", "connection"})
"""Of ``TRANSFER``, what may be over a moment later. ``SecondaryTier.transient`` has a tier's own."""


def word_for(error: BaseException) -> str:
    """Return the word of ``TRANSFER`` that an exception is counted as."""
    if isinstance(error, TimeoutError):
        return "timeout"
    return "connection" if isinstance(error, ConnectionError) else UNKNOWN


def bounded(counts: Mapping[str, int], words: Collection[str], total: int) -> dict[str, int]:
    """Make counts of reasons that add up to ``total``, in ``words`` only.

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
