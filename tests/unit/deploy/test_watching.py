"""Rules, alerts and dashboards: what can be checked without Prometheus and Grafana, and with promtool where it is installed."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
RULES = [DEPLOY / "prometheus" / name for name in ("rules.yml", "alerts.yml")]


def rules(file: Path) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]]


def test_the_dashboards_are_what_their_tables_say() -> None:
    rendered = runpy.run_path(str(DEPLOY / "grafana" / "make_dashboards.py"))["rendered"]()
    folder = DEPLOY / "grafana" / "dashboards"
    assert {file.name: file.read_text() for file in folder.iterdir()} == rendered, (
        "run python deploy/grafana/make_dashboards.py"
    )
    for text in rendered.values():
        for panel in json.loads(text)["panels"]:
            assert all(target["expr"].count("(") == target["expr"].count(")") for target in panel["targets"])


def test_there_are_thirteen_alerts_each_with_a_case_and_a_remedy() -> None:
    alerts = rules(DEPLOY / "prometheus" / "alerts.yml")
    names = {alert["alert"] for alert in alerts}
    assert len(names) == 13
    cases = (Path(__file__).parent / "prometheus_cases.yml").read_text()
    for alert in alerts:
        assert alert["alert"] in cases
        assert alert["labels"]["severity"] in ("page", "warning", "info")
        assert alert["annotations"]["summary"]
        assert alert["annotations"]["description"]


def test_alerts_and_dashboards_read_only_what_is_recorded() -> None:
    """The metrics themselves are compared with a running Baton's by tests/e2e/test_tracing.py."""
    recorded = {rule["record"] for file in RULES for rule in rules(file) if "record" in rule}
    for file in [*RULES, *(DEPLOY / "grafana" / "dashboards").glob("*.json")]:
        assert set(re.findall(r"\bbaton:[a-zA-Z0-9_:]+", file.read_text())) <= recorded


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is in Debian's package prometheus")
def test_promtool_accepts_the_rules_and_the_alerts_fire_when_they_should() -> None:
    subprocess.run(["promtool", "check", "rules", *map(str, RULES)], check=True, timeout=60)
    cases = Path(__file__).parent / "prometheus_cases.yml"
    subprocess.run(["promtool", "test", "rules", str(cases)], check=True, timeout=120)


def test_the_collector_gets_through_what_its_pipelines_name() -> None:
    collector = yaml.safe_load((DEPLOY / "otel" / "collector.yml").read_text())
    for pipeline in collector["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= set(collector[kind])
    keys = re.findall(r"key: (baton[\w.]+)", (DEPLOY / "otel" / "collector.yml").read_text())
    sources = "".join(
        file.read_text() for package in ("gateway", "prefill", "decode") for file in (ROOT / package).rglob("*.py")
    )
    assert keys
    assert all(f'"{key}"' in sources for key in keys)
