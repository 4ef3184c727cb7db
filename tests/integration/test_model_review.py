"""Models whose caches vLLM releases share have the reviewed code: the same code computes a chunk."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import vllm
from vllm.model_executor.models.registry import _VLLM_MODELS, _resolve_module_name

from kvtier.adapters.vllm._excluded_settings import SAME_BACKENDS, SAME_MODELS

pytestmark = pytest.mark.releases

REVIEWED = Path(__file__).with_name("reviewed_models.json")
"""The digests of each architecture's code. Some versions differ only in code that leaves the KV alone: read
them."""

PLACES = ("vllm.model_executor.models.", "vllm.models.")
NOT_MODELS = {"adapters", "config", "interfaces", "interfaces_base", "module_mapping", "registry"}
NOT_MODELS |= {"utils", "vision"}


def file_of(root: Path, module: str) -> Path | None:
    path = root.joinpath(*module.split(".")[1:])
    return next((it for it in (path.with_suffix(".py"), path / "__init__.py") if it.is_file()), None)


def imported(module: str, tree: ast.Module, *, is_package: bool) -> Iterator[str]:
    """Yield the names of possible model modules."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@functools.cache
def read(root: Path, module: str) -> tuple[bytes, frozenset[str]]:
    """Return the code of a module and the model modules that it imports."""
    path = file_of(root, module)
    assert path is not None, module
    tree = ast.parse(path.read_bytes())
    found = imported(module, tree, is_package=path.name == "__init__.py")
    models = {it for it in found if it.startswith(PLACES) and it.rpartition(".")[2] not in NOT_MODELS}
    return path.read_bytes(), frozenset(it for it in models if file_of(root, it))


def digest_of(root: Path, module: str) -> str:
    """Return a digest of a module and of all model modules that it needs."""
    needed, left = set[str](), {module}
    while left:
        needed |= left
        left = set[str]().union(*(read(root, it)[1] for it in left)) - needed
    digest = hashlib.sha256()
    for it in sorted(needed):
        digest.update(it.encode() + b"\0" + read(root, it)[0])
    return digest.hexdigest()[:16]


def test_shared_models_have_reviewed_code() -> None:
    root, reviewed = Path(vllm.__file__).parent, json.loads(REVIEWED.read_text())
    assert reviewed.keys() == SAME_MODELS
    modules = {name: _resolve_module_name(_VLLM_MODELS[name][0]) for name in SAME_MODELS}
    assert [
        name for name, module in modules.items() if digest_of(root, module) not in reviewed[name]
    ] == [], "read what has changed, then add the digest, or remove the model"


WRITES_PAGES = re.compile(r"cache_update|kv_cache_shape|kv_views|pth_key_value|split_kv_cache|scale_caches")
BASE = "vllm.v1.attention.backend"
REVIEWED_WRITERS = {
    "vllm.v1.attention.backend": {"cd53400f9ab26c59", "213208ff1c18dadb"},
    "vllm.v1.attention.backends.cpu_attn": {"ab4e57a9dc7f4adc"},
    "vllm.v1.attention.backends.flash_attn": {"48b628d73a9cc62b"},
    "vllm.v1.attention.backends.flashinfer": {"4ceed44c3916592e", "a3c6878293ac424e"},
    "vllm.v1.attention.backends.flex_attention": {"fc85b2b9b21ff028"},
    "vllm.v1.attention.backends.mla.cpu_mla": {"86e3d09b2e003b5d", "970a5ec2c5bd773a"},
    "vllm.v1.attention.backends.mla.cutlass_mla": {"e3b0c44298fc1c14"},
    "vllm.v1.attention.backends.mla.flashattn_mla": {"e3b0c44298fc1c14"},
    "vllm.v1.attention.backends.mla.flashinfer_mla": {"e3b0c44298fc1c14"},
    "vllm.v1.attention.backends.mla.flashmla": {"e3b0c44298fc1c14"},
    "vllm.v1.attention.backends.mla.triton_mla": {"e3b0c44298fc1c14"},
    "vllm.v1.attention.backends.triton_attn": {"faf921ad7f36402f", "95c87e0f23784cf5"},
}
"""The digests of attention backends' methods that write to pages, by module."""


def writers_digest(root: Path, module: str) -> str:
    path = file_of(root, module)
    assert path is not None, module
    tree = ast.parse(path.read_bytes())
    methods = [
        it for it in ast.walk(tree) if isinstance(it, ast.FunctionDef) and WRITES_PAGES.search(it.name)
    ]
    return hashlib.sha256("\n".join(map(ast.unparse, methods)).encode()).hexdigest()[:16]


def test_shared_backends_write_as_reviewed() -> None:
    root = Path(vllm.__file__).parent
    modules = {BASE, *(name.rpartition(".")[0] for name in SAME_BACKENDS)}
    assert modules == REVIEWED_WRITERS.keys()
    changed = {
        it: digest for it in modules if (digest := writers_digest(root, it)) not in REVIEWED_WRITERS[it]
    }
    assert changed == {}, "read how pages are arranged now, then add the digest, or remove the backend"
