"""Alert rules, dashboard, deployment: they name existing metrics, alerts fire in time, and tools read
them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier._telemetry.catalogue import BYTES, COUNTERS, GAUGES

ROOT = Path(__file__).parents[2]
FILES = ROOT / "docs" / "assets" / "monitoring"
DEPLOY = ROOT / "docs" / "assets" / "deploy"
ADDED = {"instance", "job", "engine", "model_name"}  # of Prometheus and vLLM
LABELS = {
    **{f"{metric.name}_total": metric.labels for metric in (*COUNTERS.values(), *BYTES.values())},
    **{metric.name: metric.labels for metric in GAUGES.values()},
}
METRIC = re.compile(r"\b((?:kvtier_|vllm:)\w+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\bby \(([\w, ]+)\)")


def expressions() -> Iterator[str]:
    dashboard = json.loads((FILES / "dashboard.json").read_text())
    yield from (target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", []))
    rules = (FILES / "alerts.yml").read_text()
    yield from re.findall(r"expr: (.*?)\n +(?:for|labels):", rules, re.DOTALL)


@pytest.mark.parametrize("expression", sorted({*expressions()}))
def test_expressions_use_real_metrics(expression: str) -> None:
    used = METRIC.findall(expression)
    assert used
    grouped = {label for labels in GROUPED.findall(expression) for label in labels.split(", ")}
    for metric, matchers in used:
        known = ADDED | set(LABELS[metric])
        assert set(re.findall(r"(\w+)=", matchers)) | grouped <= known, metric


def test_alerts_have_runbook_rows() -> None:
    page, rules = (ROOT / "docs" / "operate.md").read_text(), (FILES / "alerts.yml").read_text()
    assert sorted(re.findall(r"`(Kvtier\w+)`", page)) == sorted(re.findall(r"alert: (\w+)", rules))
    named = re.findall(r"runbook: (.*)", rules)
    for row in named:
        assert re.search(rf"^\| (\*\*)?{row}(\*\*)? \|", page, re.MULTILINE), row


def test_alerts_fire_when_due() -> None:
    rules = (FILES / "alerts.yml").read_text()
    cases = Path(__file__).with_name("alerts_test.yml")
    assert set(re.findall(r"alert: (\w+)", rules)) == set(re.findall(r"alertname: (\w+)", cases.read_text()))
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: it comes with Prometheus")
    done = subprocess.run(["promtool", "test", "rules", str(cases)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_accepts_compose_file(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: it comes with Prometheus")
    for file in (DEPLOY / "compose" / "prometheus.yml", FILES / "alerts.yml"):
        shutil.copy(file, tmp_path)
    command = ["promtool", "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_systemd_accepts_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: it comes with systemd")
    unit = tmp_path / "kvtier-engine.service"
    text = re.sub(
        r"/opt/engine/bin/\w+", shutil.which("true") or "/bin/true", (DEPLOY / unit.name).read_text()
    )

    def complaints(text: str) -> list[str]:
        unit.write_text(text)
        command = ["systemd-analyze", "verify", str(unit)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        # It also checks the machine's other units. For an unknown key its exit status is 0.
        return [line for line in done.stderr.splitlines() if unit.name in line]

    assert complaints(text) == []
    assert complaints(text.replace("[Service]", "[Service]\nBogus=1")) != [], "it complains where it should"
