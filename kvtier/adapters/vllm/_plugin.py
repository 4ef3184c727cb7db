"""vLLM's plug-in: loaded in every process of an engine, it registers the spec and the connector."""

from __future__ import annotations

from contextlib import suppress

SPEC_NAME = "KVTierOffloadingSpec"
SPEC_MODULE = "kvtier.adapters.vllm.spec"
CONNECTOR_NAME = "KVTierConnector"
CONNECTOR_MODULE = "kvtier.adapters.vllm.connector"


def register() -> None:
    """Register spec and connector with vLLM. vLLM may call it more than once in a process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    with suppress(ValueError):  # raised if it is registered already; vLLM offers no other check
        OffloadingSpecFactory.register_spec(SPEC_NAME, SPEC_MODULE, SPEC_NAME)
    with suppress(ValueError):
        KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
