"""If block hashes do not name content, no later run of an engine finds the chunks."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

pytest.importorskip("vllm")

import torch
import vllm
from vllm.config import VllmConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.video_prune.evs import recompute_mrope_positions
from vllm.renderers.base import BaseRenderer
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCoreProc

from kvtier.adapters.vllm._compat import CHANGES_WEIGHTS, TRACKS_BLOCKS, EngineContext, watch_weights
from tests.integration.configurations import configure, identity_of, make_model

pytestmark = pytest.mark.releases


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a model's configuration."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    return make_model(tmp_path / "model")


def is_found_again(config: VllmConfig, **settings: Any) -> bool:
    """Return whether two starts of this engine share one cache."""
    one, other = (identity_of(config, **settings).digest for _ in range(2))
    return one == other


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("cache_gb", [0, 4])
def test_numbered_media_stay_private(
    model: Path, caplog: pytest.LogCaptureFixture, cache_gb: float, prefix_caching: bool
) -> None:
    config = configure(model, enable_prefix_caching=prefix_caching)
    config.model_config.multimodal_config = MultiModalConfig(mm_processor_cache_gb=cache_gb)
    renderer: Any = SimpleNamespace(
        model_config=config.model_config, config=config, _validate_mm_uuids=lambda *_: None
    )
    images: Any = SimpleNamespace(get_all_counts=lambda: {"image": 1})
    numbered = BaseRenderer._process_mm_uuids(renderer, {}, images, {}, "renderer0-mm-1")

    assert is_found_again(config) is not bool(numbered)
    assert ("number images and other media" in caplog.text) is bool(numbered)


def test_text_models_need_no_hashes(model: Path) -> None:
    assert is_found_again(configure(model, enable_prefix_caching=False))


def test_immutable_adapters_are_found(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = configure(model, enable_lora=True)
    assert not is_found_again(config)
    assert "set immutable_adapters" in caplog.text
    assert is_found_again(config, immutable_adapters=True)
    assert not is_found_again(config, namespace="tenant")


def test_weights_of_trainer_stay_private(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The files, if any, hold the weights that the engine starts with."""
    assert is_found_again(configure(model))
    assert not is_found_again(configure(model, weight_transfer_config=WeightTransferConfig(backend="nccl")))
    assert "a trainer can replace the weights" in caplog.text


def test_new_weights_are_noticed() -> None:
    """vLLM tells its connectors of none, but its engine passes calls of workers' methods on."""
    calls: list[object] = []
    core = _Core(calls)
    methods = ("reload_weights", "update_weights", load_weights, "apply_model", "profile", "init_weights")
    for method in methods:
        core.collective_rpc(method, 1.0)
    sent: tuple[object, ...] = ("profile", None, (), {})  # as the engine's process gets it
    core.collective_rpc(*EngineCoreProc._convert_msgspec_args(core.collective_rpc, sent))
    core.collective_rpc(method="compute_weight_checksums")
    changes = "changes"
    assert calls == [
        *(changes, "reload_weights"),
        "update_weights",
        *(changes, load_weights, changes, "apply_model"),
        *("profile", changes, "init_weights", "profile", "compute_weight_checksums"),
    ]


@pytest.mark.parametrize("method", [lambda worker: None, partial(print), b"pickled"], ids=str)
def test_unnamed_functions_may_change_weights(method: object) -> None:
    calls: list[object] = []
    _Core(calls).collective_rpc(method)
    assert calls == ["changes", method]


def load_weights() -> None:
    """A trainer's own function."""


class _Core:
    """An engine core as far as ``watch_weights`` sees it."""

    def __init__(self, calls: list[object]) -> None:
        self.model_executor = object()
        self.calls = calls
        watch_weights(lambda: calls.append("changes"))

    def collective_rpc(
        self, method: object, timeout: float | None = None, args: object = (), kwargs: object = None
    ) -> None:
        self.calls.append(method)


def test_methods_that_change_weights_were_reviewed() -> None:
    source = inspect.getsource(importlib.import_module("vllm.v1.worker.gpu_worker"))
    methods = set(re.findall(r"def ([a-z]\w*weight\w*)", source))
    assert {it for it in methods if not CHANGES_WEIGHTS.match(it)} <= {
        "compute_weight_checksums",
        "init_weight_transfer_engine",
        "shutdown_weight_transfer_engine",
        "supports_draft_weight_updates",
        "update_weights",  # between the next ones
    }
    assert {"start_weight_update", "start_draft_weight_update", "finish_weight_update"} < methods


def _beside(*media: tuple[str, int, int]) -> Any:
    """Make a request as vLLM's hashes see it: media and their positions."""
    features = [
        SimpleNamespace(
            identifier=name, modality=name, mm_position=PlaceholderRange(offset=offset, length=length)
        )
        for name, offset, length in media
    ]
    return SimpleNamespace(
        mm_features=features,
        lora_request=None,
        cache_salt=None,
        prompt_embeds=None,
        is_finished=lambda: False,
        num_prompt_tokens=64,
        num_tokens=64,
        num_computed_tokens=64,
    )


def _keys(request: Any) -> list[Any]:
    found, at = [], 0
    for start in range(0, 64, 16):
        keys, at = kv_cache_utils.generate_block_hash_extra_keys(request, start, start + 16, at)
        found.append(keys)
    return found


@pytest.mark.parametrize(
    ("place", "named_in", "why"), [((3, 40), [2], "media"), ((43, 10), [2, 3], None), ((50, 10), [3], None)]
)
def test_media_that_share_tokens_are_not_stored(
    place: tuple[int, int], named_in: list[int], why: str | None
) -> None:
    """``use_audio_in_video`` overlaps them so. vLLM's key of a block then lacks the audio."""
    one, other = (_beside(("video", 3, 40), (sound, *place)) for sound in ("sound", "silence"))
    keys = zip(_keys(one), _keys(other), strict=True)
    assert [block for block, (mine, theirs) in enumerate(keys) if mine != theirs] == named_in

    assert _why_not_stored(one, None) == why


@pytest.mark.parametrize(
    ("media", "encodes", "ids", "stored"),
    [
        ((), True, (1, 2), ["one", "other"]),
        ((), True, (1, 1), []),
        ((("image", 3, 40),), False, (1, 2), ["one", "other"]),
        ((("image", 3, 40),), True, (1, 2), []),
    ],
)
def test_mistaken_adapters_are_not_stored(
    media: tuple[tuple[str, int, int], ...], encodes: bool, ids: tuple[int, int], stored: list[str]
) -> None:
    """vLLM's workers identify an adapter by id, its embedding cache by name; hashes contain the path."""
    engine = _Adapted(encodes)
    for name, lora_id in zip(("one", "other"), ids, strict=True):
        engine.begin(LoRARequest("adapter", lora_id, name), *media)
    assert engine.stored() == stored


@pytest.mark.parametrize(
    ("path", "in_place", "is_quiet", "stored"),
    [
        ("/new", True, True, ["/new"]),
        ("/new", True, False, []),
        ("/new", False, True, []),
        ("/old", True, False, ["/old"]),
    ],
)
def test_replaced_adapters_are_stored_if_none_was_in_use(
    path: str, in_place: bool, is_quiet: bool, stored: list[str]
) -> None:
    engine = _Adapted()
    engine.begin(LoRARequest("adapter", 1, "/old"))
    if is_quiet:  # vLLM's connector may still store the blocks that the request has computed
        engine.states["/old"].req.is_finished = lambda: True
    engine.context.note_adapter(LoRARequest("adapter", 1, path, load_inplace=in_place))
    engine.begin(LoRARequest("adapter", 1, path))
    assert engine.stored() == stored, "not the old one, too"

    engine.states.clear()
    for again in ("/old", "/new", "/third"):
        engine.context.note_adapter(LoRARequest("adapter", 1, again, load_inplace=True))
        engine.begin(LoRARequest("adapter", 1, again))
        is_doubtful = again != "/third" and not stored
        assert engine.stored() == ([] if is_doubtful else [again]), "the prefix cache may have blocks of both"
        engine.states.clear()


class _Adapted:
    """An engine with adapters."""

    def __init__(self, encodes: bool = False) -> None:
        self.states: dict[str, Any] = {}
        connector: Any = SimpleNamespace(connector_scheduler=SimpleNamespace(_req_status=self.states))
        config: Any = SimpleNamespace(
            model_config=SimpleNamespace(
                architectures=["LlamaForCausalLM"], hf_config=None, is_mm_prefix_lm=False
            ),
            lora_config=SimpleNamespace(enable_tower_connector_lora=encodes),
        )
        self.context = EngineContext(config, SimpleNamespace(), connector)

    def begin(self, lora: LoRARequest, *media: tuple[str, int, int]) -> None:
        """Start a request whose adapter's path is the request's name."""
        self.context.note_adapter(lora)
        request = _beside(*media)
        request.lora_request = lora
        self.states[lora.lora_path] = SimpleNamespace(req=request)

    def stored(self) -> list[str]:
        return [name for name in self.states if self.context.why_not_stored(name) is None]


@pytest.mark.parametrize(
    ("architecture", "vision", "why"),
    [
        ("NemotronH_Nano_VL_V2", {"min_num_patches": 4}, "media"),
        ("NemotronH_Nano_VL_V2", {}, None),
        ("H2OVLChatModel", {}, None if TRACKS_BLOCKS else "media"),
        ("DeepseekVLV2ForCausalLM", {}, None if TRACKS_BLOCKS else "media"),
    ],
)
def test_images_sized_together_are_not_stored(
    architecture: str, vision: dict[str, int], why: str | None
) -> None:
    config = SimpleNamespace(vision_config=SimpleNamespace(args=vision))
    model: dict[str, Any] = {"architectures": [architecture], "hf_config": config}
    assert _why_not_stored(_beside(("image", 3, 40)), MultiModalConfig(), **model) == why
    assert _why_not_stored(_beside(("audio", 3, 40)), MultiModalConfig(), **model) is None


def test_size_of_image_depends_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such chunks are not stored, because vLLM's hash of an image is the same."""
    for name in ("torchvision", "torchvision.transforms"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    processors = importlib.import_module("vllm.transformers_utils.processors.nano_nemotron_vl")
    tiler = processors.DynamicResolutionImageTiler(
        max_model_len=256,
        min_num_patches=4,
        max_num_patches=4096,
        patch_size=16,
        downsample_ratio=0.5,
        norm_mean=[0] * 3,
        norm_std=[1] * 3,
    )
    make_image = importlib.import_module("PIL.Image").new  # a dependency of vLLM
    image, other = make_image("RGB", (512, 384), "red"), make_image("RGB", (512, 384), "blue")

    def tokens(*images: object, text: int = 2) -> int:
        found = tiler.compute_params(list(images), tiler.max_num_tokens_available(text))
        return int(found[0].num_embeddings)

    assert tokens(image, other) < tokens(image) > tokens(image, text=200)


def test_processors_that_bypass_their_cache_were_reviewed() -> None:
    """vLLM caches the processor's output for a medium by its hash, unless the output depends on more.

    Some hashes reflect that; others have noise, one audio, or tokens in another order.
    """
    folder = Path(vllm.__file__).parent / "model_executor" / "models"
    sources = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    bypass = {name for name, source in sources.items() if "def _cached_apply_hf_processor" in source}
    harmless = {"cohere_asr", "funasr", "jina_vl", "qwen3_asr_realtime", "voxtral_realtime"}
    refused = {"unlimited_ocr"}  # at the start: see ``prevents_reuse``
    assert bypass - refused <= {"deepseek_vl2", "h2ovl"} | harmless
    if TRACKS_BLOCKS:
        assert all("def _get_mm_hashes" in sources[name] for name in bypass - harmless)
    tilers = {name for name, source in sources.items() if "num_tokens_per_image" in source}
    assert tilers == {"nano_nemotron_vl"}


def _why_not_stored(
    request: Any, media: MultiModalConfig | None, uses_mrope: bool = True, **model: Any
) -> str | None:
    status = {"a": SimpleNamespace(req=request)}
    connector: Any = SimpleNamespace(connector_scheduler=SimpleNamespace(_req_status=status))
    plain = {"architectures": ["LlamaForCausalLM"], "hf_config": None, "is_mm_prefix_lm": False}
    fields = plain | model
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=media, uses_mrope=uses_mrope, **fields)
    )
    return EngineContext(config, SimpleNamespace(), connector).why_not_stored("a")


@pytest.mark.parametrize(
    ("kind", "rate", "uses_mrope", "why"),
    [
        ("video", 0.5, True, "pruned"),
        ("video", 0.0, True, None),
        ("video", None, True, None),
        ("video", 0.5, False, None),
        ("image", 0.5, True, None),
    ],
)
def test_pruned_videos_are_not_stored(
    kind: str, rate: float | None, uses_mrope: bool, why: str | None
) -> None:
    media = MultiModalConfig(video_pruning_rate=rate)
    assert _why_not_stored(_beside((kind, 3, 40)), media, uses_mrope) == why


@pytest.mark.parametrize(("kind", "why"), [("image", "split"), ("video", "split"), ("audio", None)])
@pytest.mark.parametrize(("sees_blocks", "is_whole"), [(False, True), (True, False)])
def test_images_that_may_be_split_are_not_stored(
    kind: str, why: str | None, sees_blocks: bool, is_whole: bool
) -> None:
    engine = _of_joint_images({"one": _beside((kind, 3, 40)), "text": _beside()}, sees_blocks, is_whole)
    assert (engine.why_not_stored("one"), engine.why_not_stored("text")) == (why, None)


def test_hits_are_not_stored_after_split_images() -> None:
    requests = {name: _beside(("image", 3, 40)) for name in ("split", "hit", "whole", "resumed")}
    engine = _of_joint_images(requests)

    def refused_after(**steps: tuple[int, int]) -> set[str]:
        """Make a step with new requests, given their computed and scheduled tokens."""
        for name, (computed, _) in steps.items():
            requests[name].num_computed_tokens = computed
        scheduled = {name: tokens for name, (_, tokens) in steps.items()}
        new = [SimpleNamespace(req_id=name) for name in steps]
        engine.note_step(
            cast(SchedulerOutput, SimpleNamespace(scheduled_new_reqs=new, num_scheduled_tokens=scheduled))
        )
        return {name for name in requests if engine.why_not_stored(name) == "split"}

    assert refused_after(whole=(0, 3), hit=(16, 27)) == set()
    assert refused_after(split=(16, 10)) == {"split", "hit"}
    requests["resumed"].num_preemptions = 1
    assert refused_after(whole=(3, 40)) == {"split", "hit", "resumed"}
    del requests["hit"]
    assert refused_after() == {"split", "resumed"}
    assert engine.splits.behind_hits == {"split"}


def _of_joint_images(
    requests: dict[str, Any], sees_blocks: bool = True, is_whole: bool = True
) -> EngineContext:
    """Make the engine of a model whose image tokens attend to each other."""
    for name, request in requests.items():
        request.request_id, request.num_preemptions = name, 0
    states = SimpleNamespace(
        get=lambda name: SimpleNamespace(req=requests[name]) if name in requests else None
    )
    connector: Any = SimpleNamespace(connector_scheduler=SimpleNamespace(_req_status=states))
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(
            is_mm_prefix_lm=True, architectures=[], hf_config=None, multimodal_config=None
        ),
        scheduler_config=SimpleNamespace(disable_chunked_mm_input=is_whole),
    )
    return EngineContext(config, SimpleNamespace(), connector, sees_blocks)


@pytest.mark.parametrize(("computed", "scheduled"), [(0, 3), (16, 10)])
def test_images_are_split_behind_hits_amid_them(computed: int, scheduled: int) -> None:
    """Such chunks are not stored: vLLM ends a step in front of an image only if it also begins there."""
    scheduler: Any = MagicMock(is_encoder_decoder=False, ec_connector=None)
    scheduler.scheduler_config.disable_chunked_mm_input = True
    scheduler.encoder_cache_manager.get_cached_num_encoder_embeds.return_value = None
    scheduler.encoder_cache_manager.check_and_update_cache.return_value = False
    request: Any = SimpleNamespace(
        has_encoder_inputs=True,
        mm_features=[
            MultiModalFeatureSpec(None, "image", "name", PlaceholderRange(offset=3, length=40), "hash")
        ],
    )
    found = Scheduler._try_schedule_encoder_inputs(scheduler, request, computed, 10, 4096)
    assert found[1] == scheduled


def test_positions_behind_pruned_videos_depend_on_hits() -> None:
    """Such chunks are not stored: vLLM corrects positions only in the step that computes the video."""
    start, image, video, kept = 5, 3, 4, torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1], [3, 1, 1]])
    tokens = torch.tensor([9, start, *[video] * len(kept), 6, *range(10, 20)])
    behind = 2 + len(kept)
    at_first = torch.arange(len(tokens)).repeat(3, 1)
    of_video = torch.cat([kept.T, torch.full((1, len(kept)), 2)])

    def positions(seen: list[torch.Tensor], computed: int) -> list[list[int]]:
        found, _ = recompute_mrope_positions(tokens, seen, at_first, computed, start, image, video)
        listed: list[list[int]] = found[:, behind:].tolist()
        return listed

    assert positions([of_video], 0) != positions([], behind) == at_first[:, behind:].tolist()


def test_hash_sources_were_reviewed() -> None:
    """Tokens, salt and embeddings are content; kvtier refuses media and adapters whose hashes are not."""
    source = Path(kv_cache_utils.__file__).read_text(encoding="utf-8")
    (body,) = re.findall(r"^def generate_block_hash_extra_keys\((.*?)^def ", source, re.MULTILINE | re.DOTALL)
    (added,) = re.findall(r"extra_keys: list\[Any\] = \((.*?)\)", body, re.DOTALL)
    assert set(added.split()) - {"+"} == {
        "lora_extra_keys",
        "mm_extra_keys",
        "cache_salt_keys",
        "prompt_embeds_keys",
    }
    (keys,) = re.findall(r'return \[\("lora", (.*?)\)\]', source)
    assert keys == "lora_request.lora_name, lora_request.lora_path"
