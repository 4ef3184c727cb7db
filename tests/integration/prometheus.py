"""A real Prometheus that scrapes one server, with kvtier's alert rules."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvtier_testing.tiers._servers import absent

MONITORING = Path(__file__).parents[2] / "docs" / "assets" / "monitoring"
_READY_S = 60.0


class Prometheus:
    """Scrapes a server every second. A context manager.

    Args:
        target: host and port of the server.
        port: where Prometheus itself listens, on loopback.
    """

    def __init__(self, target: str, port: int, folder: Path) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._folder = folder
        folder.mkdir()
        configuration = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(MONITORING / "alerts.yml")],
            "scrape_configs": [{"job_name": "vllm", "static_configs": [{"targets": [target]}]}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(configuration))  # JSON is YAML

    def __enter__(self) -> Prometheus:
        program = shutil.which("prometheus")
        if program is None:
            absent("Prometheus is not installed: the distribution's package is called prometheus")
        command = [program, f"--config.file={self._folder}/prometheus.yml"]
        command += [f"--storage.tsdb.path={self._folder}/data", f"--web.listen-address={self._url[7:]}"]
        with (self._folder / "log").open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        end_s = time.monotonic() + _READY_S
        while True:
            with suppress(OSError), urllib.request.urlopen(f"{self._url}/-/ready", timeout=5):
                return self
            assert time.monotonic() < end_s, (self._folder / "log").read_text()
            time.sleep(0.1)

    def __exit__(self, *exc: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(_READY_S)

    def query(self, expression: str) -> list[Any]:
        """Return the current samples of an expression. Raise HTTPError if the expression is invalid."""
        found: list[Any] = self._get("query", query=expression)["result"]
        return found

    def alerts(self) -> set[tuple[str, str, str]]:
        """Return name, tier and state of the alerts that are pending or firing."""
        found = self._get("alerts")["alerts"]
        return {(it["labels"]["alertname"], it["labels"].get("tier", ""), it["state"]) for it in found}

    def _get(self, what: str, **parameters: str) -> Any:
        asked = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return json.load(answer)["data"]


def panels() -> dict[str, str]:
    """Return the dashboard's expressions, for all models, by panel and legend."""
    found = {}
    for panel in json.loads((MONITORING / "dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$__rate_interval", "1m")
            for variable in ("$model", "$engine"):
                expression = expression.replace(variable, ".*")
            found[f"{panel['title']} / {target['legendFormat']}"] = expression
    return found
