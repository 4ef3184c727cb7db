"""vLLM accepts the documented ``vllm serve`` command, which creates kvtier's spec. No engine starts."""

from __future__ import annotations

import logging
import re
import shlex
from pathlib import Path

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvtier.adapters.vllm._compat import providing_engine
from kvtier.adapters.vllm.spec import KVTierOffloadingSpec
from tests.integration.configurations import engine_of, make_model

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/get-started.md"])
def test_vllm_accepts_page_command(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("kvtier")
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    (command,) = re.findall(r"^vllm serve .*?}'$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    serve = shlex.split(command)[3:]  # after the model, which this machine does not have
    model = make_model(tmp_path / "model")
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    ours = ["--model", str(model), "--block-size", "32", "--dtype", "float32", "--skip-tokenizer-init"]
    arguments = parser.parse_args([*serve, *ours])
    vllm_config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()

    load_general_plugins()
    engine = engine_of(vllm_config)
    with providing_engine(engine):
        spec = OffloadingSpecFactory.create_spec(build_offloading_config(vllm_config, engine.kv_cache_config))
    assert isinstance(spec, KVTierOffloadingSpec)
    theirs = logging.getLogger("vllm")
    assert logger.handlers == theirs.handlers != [], "lines lack vLLM's time and process"
    assert logger.getEffectiveLevel() == theirs.getEffectiveLevel()
