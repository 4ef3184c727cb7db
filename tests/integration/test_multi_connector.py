"""kvtier in ``MultiConnector``, with a connector that receives into blocks that kvtier stores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtier_bench.engine.compared import EngineError
from kvtier_testing.tiers._servers import free_port
from tests.integration.conftest import Ask, in_full
from tests.integration.harness import OUTPUT_TOKENS, PROMPT_CHUNKS, Engine, Launcher, Tokens, patient, prompt

pytestmark = pytest.mark.releases

MODULE = "tests.integration.transport"
TRANSPORT = {"kv_connector": "Transport", "kv_connector_module_path": MODULE, "kv_role": "kv_both"}
BLOCKS = 20  # a prompt takes nearly all of them, so the next prompt reuses its blocks
ENDS = 512 - OUTPUT_TOKENS + 1  # length of a prompt whose last token completes its last chunk
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
PLAIN = {"kv_connector": "OffloadingConnector"}
CHECKED = {"kv_connector": "KVTierConnector", "kv_connector_module_path": "kvtier.adapters.vllm.connector"}


def ours(settings: Mapping[str, Any], kind: Mapping[str, str]) -> dict[str, Any]:
    """Return the configuration of kvtier's connector."""
    extra = {"spec_name": "KVTierOffloadingSpec", "offload_prompt_only": False, **patient(settings)}
    return {**kind, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def start(launcher: Launcher, llama: Path, *children: Mapping[str, Any], **arguments: Any) -> Engine:
    """Start an engine with these connectors."""
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }
    engine = launcher.start(llama, None, kv_transfer_config=transfer, **arguments)
    engine.has_kvtier = True
    return engine


def start_small(launcher: Launcher, llama: Path, *children: Mapping[str, Any]) -> Engine:
    """Start an engine that stores a request's last chunk after another request took its blocks."""
    sizes = {"num_gpu_blocks_override": BLOCKS, "max_model_len": 600}
    return start(launcher, llama, *children, async_scheduling=True, **sizes)


def texts(engine: Engine, how: str) -> list[Tokens]:
    """Answer prompts, each followed by a received one; return the prompts with their continuations."""
    asked = [prompt(seed, ENDS) for seed in range(6)]
    received = [prompt((100 if how == "sync" else 200) + seed, ENDS) for seed in range(6)]
    mixed = [one for pair in zip(asked, received, strict=True) for one in pair]
    told = engine.call(
        "serve", module=MODULE, prompts=mixed, output_tokens=OUTPUT_TOKENS, how=[None, how] * len(asked)
    )
    answers = told["answers"][how == "sync" :: 2]  # failed prompts are computed
    chosen = received if how == "sync" else asked
    return [[*text, *answer, 5, 6, 7] for text, answer in zip(chosen, answers, strict=True)]


@pytest.mark.parametrize("first", [False, in_full(True)])
def test_neighbour_waits_for_stores(
    launcher: Launcher, llama: Path, reference: Ask, settings: dict[str, Any], first: bool
) -> None:
    children = [TRANSPORT, ours(settings, CHECKED)]
    with start_small(launcher, llama, *children[:: -1 if first else 1]) as engine:
        asked = texts(engine, "async")
        failed = texts(engine, "sync")
        engine.settled()
        engine.reset(connector=False)
        answers, loaded = engine.served(*asked, *failed)
    assert answers == reference(*asked, *failed)
    assert loaded["cpu"] >= len(asked) * 16, "each text is stored whole"


@pytest.mark.parametrize("role", [in_full("kv_both"), "kv_producer"])
def test_received_chunks_are_not_for_engines_that_compute(
    launcher: Launcher, llama: Path, reference: Ask, settings: dict[str, Any], role: str
) -> None:
    """A producer also receives: vLLM's NixlConnector does with bidirectional_kv_xfer."""
    asked = prompt(1)
    with start(launcher, llama, {**TRANSPORT, "kv_role": role}, ours(settings, CHECKED)) as engine:
        engine.call("serve", module=MODULE, prompts=[asked], output_tokens=OUTPUT_TOKENS, how=["async"])
        assert engine.settled().value("kvtier_stored_chunks") >= PROMPT_CHUNKS
    with launcher.start(llama, patient(settings)) as engine:
        answers = engine.generate(asked)
    assert answers == reference(asked)


def test_plain_connector_stores_nothing(launcher: Launcher, llama: Path, settings: dict[str, Any]) -> None:
    with start_small(launcher, llama, TRANSPORT, ours(settings, PLAIN)) as engine:
        texts(engine, "async")
        metrics = engine.settled()
    assert metrics.value("kvtier_stored_chunks") == 0
    assert metrics.value("kvtier_store_refused_chunks", reason="neighbour") > 0
    assert "use KVTierConnector" in engine.log()


def test_two_kvtier_connectors_refused(launcher: Launcher, llama: Path) -> None:
    child = ours({"cpu_bytes_to_use": "16MiB"}, PLAIN)
    with pytest.raises(EngineError, match="two connectors with kvtier's spec"):
        start(launcher, llama, child, child)


@pytest.mark.full
@pytest.mark.parametrize("first", [False, True])
def test_nixl_prefill_then_kvtier(
    launcher: Launcher, llama: Path, reference: Ask, settings: dict[str, Any], first: bool
) -> None:
    pytest.importorskip("nixl")
    del settings["secondary_tiers"]
    asked, children = prompt(1), [NIXL, ours(settings, CHECKED)][:: -1 if first else 1]
    with (
        start(launcher, llama, *children, environment=side_channel()) as prefill,
        start(launcher, llama, *children, environment=side_channel()) as decode,
    ):
        roles = "tests.integration.pd_roles"
        told = prefill.call("respond", module=roles, prompt=asked, params={"do_remote_decode": True})
        assert "kvtier" not in told["params"], "the transport brings all chunks: none is awaited"
        answers = decode.generate(asked, kv_transfer_params=told["params"])
        stored = decode.settled().value("kvtier_stored_chunks")
        assert "NIXL compatibility check passed" in decode.log(), "it was received"
        decode.reset(connector=False)
        again = decode.served(asked)
    assert (answers, stored) == (reference(asked), PROMPT_CHUNKS)
    assert again == (answers, {"cpu": PROMPT_CHUNKS})


def side_channel() -> dict[str, str]:
    """Return the environment of an engine whose NIXL has its own port."""
    address = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    return {**address, "UCX_TLS": "tcp,self"}
