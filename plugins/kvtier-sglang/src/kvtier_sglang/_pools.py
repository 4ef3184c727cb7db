"""The prefixes of a prompt that can be restored if several pools must have their pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer, PoolTransferResult


def leading(found: Sequence[bool]) -> int:
    """Return how many leading pages were found."""
    return found.index(False) if False in found else len(found)


def restorable(
    kv: Sequence[bool], transfers: Sequence[PoolTransfer], found: Mapping[str, Sequence[bool]]
) -> PoolTransferResult:
    """Return the longest prefix for which every pool has the pages that it needs.

    Args:
        kv: for each page, whether the KV pool's page was found.
        transfers: the other pools, and the pages that a prefix needs from them.
        found: for each pool's name, whether each page was found; as long as ``kv``.
    """
    pages = leading(kv)
    hits = {"kv": pages} if pages else {}
    lengths = set(range(1, pages + 1))
    for transfer in transfers:
        if transfer.hit_policy is PoolHitPolicy.BLOCK_GROUPS:
            continue  # This pool never gates a hit. Omitting it from the result leaves it without a verdict.
        fitting = _fitting(transfer, found[transfer.name], pages)
        if fitting:
            hits[transfer.name] = max(fitting)
        lengths &= fitting
    return PoolTransferResult(max(lengths, default=0), hits, sorted(lengths))


def _fitting(transfer: PoolTransfer, there: Sequence[bool], pages: int) -> set[int]:
    """Return the lengths of the prefixes for which one pool has all pages needed."""
    if transfer.hit_policy is PoolHitPolicy.ALL_PAGES:
        return set(range(1, min(pages, leading(there)) + 1))
    width = max(1, len(transfer.keys or ()))  # number of pages at the end of a prefix
    return {length for length in range(1, pages + 1) if all(there[max(0, length - width) : length])}
