"""Check what docs/assets has for operators: schemas of others, kvtier's settings, mounted files.

``python docs/mkdocs/deploy.py`` fails and names the problem.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonpatch
import kubernetes_validate
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from kvtier._config import TieringConfig
from kvtier._settings.quantities import size

ASSETS = Path(__file__).resolve().parents[1] / "assets"
DEPLOY = ASSETS / "deploy"
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
    (engines,) = (one for one in manifests if one["kind"] == "StatefulSet")
    shared = DEPLOY / "kubernetes-shared"
    (patches,) = (one["patches"] for one in documents(shared / "kustomization.yaml"))
    patched = jsonpatch.apply_patch(engines, yaml.safe_load(patches[0]["patch"]))
    for version in KUBERNETES:
        for manifest in (*manifests, *documents(shared / "claim.yaml"), patched):
            kubernetes_validate.validate(manifest, version, strict=True)
    for one in (engines, patched):
        check_volumes(one)
    pod = engines["spec"]["template"]["spec"]
    shared = next(volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "memory")
    wanted = engine_settings(DEPLOY / "kubernetes" / "engine.yaml").cpu_bytes_to_use
    assert (
        wanted
        < size(f"{shared['sizeLimit']}B")
        < size(f"{pod['containers'][0]['resources']['limits']['memory']}B")
    )


def check_volumes(engines: Any) -> None:
    """Raise if a container of a StatefulSet mounts a volume that is not declared exactly once."""
    pod, claims = engines["spec"]["template"]["spec"], engines["spec"].get("volumeClaimTemplates", ())
    declared = [volume["name"] for volume in pod["volumes"]] + [one["metadata"]["name"] for one in claims]
    for container in (*pod["initContainers"], *pod["containers"]):
        for mount in container["volumeMounts"]:
            assert declared.count(mount["name"]) == 1, (container["name"], mount, declared)


def check_dashboard() -> None:
    """Raise if the dashboard has a field that Grafana's schema does not know."""
    register_default_plugins()
    dashboard = json.loads((ASSETS / "monitoring" / "dashboard.json").read_text())
    known = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))
    assert not (lost := [*unknown(dashboard, known, "dashboard")]), f"Grafana does not know {lost}"


def unknown(given: Any, known: Any, name: str) -> Iterator[str]:
    """Yield the names of given fields that ``known`` lacks or has with another value."""
    if isinstance(given, dict) and isinstance(known, dict):
        for key, value in given.items():
            yield from unknown(value, known.get(key), f"{name}.{key}")
    elif isinstance(given, list) and isinstance(known, list) and len(given) == len(known):
        for number, (one, other) in enumerate(zip(given, known, strict=True)):
            yield from unknown(one, other, f"{name}[{number}]")
    elif given != known:
        yield name


def check_compose() -> None:
    """Raise if the compose file names a file that is not there, or has too little shared memory."""
    folder = DEPLOY / "compose"
    (compose,) = documents(folder / "compose.yaml")
    build = compose["services"]["engine"]["build"]
    assert (folder / build["context"] / build["dockerfile"]).exists(), f"there is no {build['dockerfile']}"
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
    check_dashboard()
    print("the manifests are valid")
