"""Check the manifests of docs/assets/deploy: Kubernetes' schemas, kvtier's settings, mounted files.

``python docs/mkdocs/deploy.py`` fails with what is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from kvtier._config import TieringConfig
from kvtier._settings.quantities import size

DEPLOY = Path(__file__).resolve().parents[1] / "assets" / "deploy"
KUBERNETES = ("1.30", "1.33")


def documents(path: Path) -> list[Any]:
    """Return the documents of a YAML file."""
    return list(yaml.safe_load_all(path.read_text()))


def engine_settings(path: Path) -> TieringConfig:
    """Return the settings of kvtier in an engine's configuration, or raise ConfigError."""
    engine = json.loads(path.read_text())  # vLLM reads it as YAML, kvtier doctor as JSON
    return TieringConfig.from_extra_config(engine["kv-transfer-config"]["kv_connector_extra_config"])


def check_kubernetes() -> None:
    """Raise if a manifest does not match the schema of a version, or memory is too small for the settings."""
    manifests = documents(DEPLOY / "kubernetes" / "engines.yaml")
    for version in KUBERNETES:
        for manifest in manifests:
            kubernetes_validate.validate(manifest, version, strict=True)
    pod = next(one for one in manifests if one["kind"] == "StatefulSet")["spec"]["template"]["spec"]
    shared = next(volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "memory")
    wanted = engine_settings(DEPLOY / "kubernetes" / "engine.yaml").cpu_bytes_to_use
    assert (
        wanted
        < size(f"{shared['sizeLimit']}B")
        < size(f"{pod['containers'][0]['resources']['limits']['memory']}B")
    )


def check_compose() -> None:
    """Raise if the compose file mounts a file that is not there, or has too little shared memory."""
    folder = DEPLOY / "compose"
    (compose,) = documents(folder / "compose.yaml")
    for source in mounted(compose):
        assert (folder / source).exists(), f"compose.yaml mounts {source}, which is not there"
    assert engine_settings(folder / "engine.yaml").cpu_bytes_to_use < size(
        compose["services"]["engine"]["shm_size"]
    )


def mounted(compose: Any) -> Iterator[str]:
    """Yield the files that services mount."""
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            if volume.startswith("."):
                yield volume.partition(":")[0]


if __name__ == "__main__":
    check_kubernetes()
    check_compose()
    print("the manifests are well")
