"""All that these commands use of the file tier's internals: no other module here imports them."""

from __future__ import annotations

from kvtier.tiers.fs import _layout as layout
from kvtier.tiers.fs._checking import FileCheck, FileChecker
from kvtier.tiers.fs._files.chunk_files import tree_bytes, tree_remove
from kvtier.tiers.fs._files.native_call import Failures, Result, StopFlag, count_failure, errno_name
from kvtier.tiers.fs._locks import opened_lock, try_lock, wait_for_lock
from kvtier.tiers.fs._maintenance.evict import Evicted, Evictor
from kvtier.tiers.fs._maintenance.quarantine import Quarantine
from kvtier.tiers.fs._maintenance.sweep import Sweeper
from kvtier.tiers.fs._quota import ledger
from kvtier.tiers.fs._quota.accounts import Accounts
from kvtier.tiers.fs._root import NAMESPACE, DataDir, Namespace, Root

__all__ = [
    "NAMESPACE",
    "Accounts",
    "DataDir",
    "Evicted",
    "Evictor",
    "Failures",
    "FileCheck",
    "FileChecker",
    "Namespace",
    "Quarantine",
    "Result",
    "Root",
    "StopFlag",
    "Sweeper",
    "count_failure",
    "errno_name",
    "layout",
    "ledger",
    "opened_lock",
    "tree_bytes",
    "tree_remove",
    "try_lock",
    "wait_for_lock",
]
