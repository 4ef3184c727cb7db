"""kvtier behind vLLM's OffloadingConnector: ``"spec_name": "KVTierOffloadingSpec"``."""
