"""KVTierConnector for workers in separate processes: copies fail in each process that imports it."""

from __future__ import annotations

import multiprocessing

from kvtier.adapters.vllm.connector import KVTierConnector
from tests.integration.faults import Faults

if multiprocessing.parent_process() is not None:
    Faults().install()

__all__ = ["KVTierConnector"]
