"""Install the fake GPU's kernels in each Python process that finds this folder, as modules are imported."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

PATCHED = {
    "torch": "use_torch",
    "triton.runtime.interpreter": "use_interpreter",
    "vllm.utils.system_utils": "use_loaded_libraries",
    "vllm._custom_ops": "use_vllm",
    "vllm.vllm_flash_attn.flash_attn_interface": "use_flash_attention",
    "vllm.v1.sample.ops.topk_topp_sampler": "use_sampler",
}
"""Functions of ``fakegpu_kernels``, called with a module after its import."""


class Loader(importlib.abc.Loader):
    """Another loader, followed by a function of ``fakegpu_kernels``."""

    def __init__(self, loader: importlib.abc.Loader, patch: str) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        patch: Callable[[ModuleType], None] = getattr(importlib.import_module("fakegpu_kernels"), self._patch)
        patch(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of ``PATCHED``, each once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (patch := PATCHED.pop(name, None)) is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader, patch)
        return spec


sys.meta_path.insert(0, Finder())
