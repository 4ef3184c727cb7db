"""What vLLM loads in every process of an engine: it makes the spec's name known."""

from __future__ import annotations

from contextlib import suppress

SPEC_NAME = "KVTierOffloadingSpec"
SPEC_MODULE = "kvtier.adapters.vllm.spec"


def register() -> None:
    """Register the spec with vLLM. vLLM may call it more than once in a process."""
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    with suppress(ValueError):  # raised where it is registered already; vLLM has no other way to tell
        OffloadingSpecFactory.register_spec(SPEC_NAME, SPEC_MODULE, SPEC_NAME)
