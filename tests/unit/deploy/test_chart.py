"""The chart's templates become YAML, name only settings that exist, and give a pod longer to stop than it drains.

Templates use nothing but `{{ .Values.a.b }}` and `| quote`, so that a few lines here render them: there is no helm in CI.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import GatewaySettings, WorkerServiceSettings, load_settings

CHART = Path(__file__).resolve().parents[3] / "deploy" / "helm" / "baton"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))


def manifests(role: str) -> list[dict[str, Any]]:
    def value(match: re.Match[str]) -> str:
        found = VALUES
        for name in match[1].split("."):
            found = found[name]
        return json.dumps(str(found)) if match[2] else str(found)

    text = (CHART / "templates" / f"{role}.yaml").read_text(encoding="utf-8")
    rendered = re.sub(r"\{\{ \.Values\.([\w.]+)( \| quote)? \}\}", value, text)
    assert "{{ " not in rendered
    return list(yaml.safe_load_all(rendered))


@pytest.mark.parametrize("role", ["gateway", "prefill", "decode"])
def test_pods_have_settings_that_exist_and_time_to_drain(role: str) -> None:
    pod = manifests(role)[0]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    environment = {entry["name"]: entry.get("value", "10.0.0.1") for entry in container["env"]}
    kind = GatewaySettings if role == "gateway" else WorkerServiceSettings
    assert {name[6:].lower() for name in environment if name.startswith("BATON_")} <= set(kind.model_fields)
    settings = load_settings(kind, command=role, arguments=[], environment=environment)
    pre_stop = 5 if "lifecycle" in container else 0
    assert pod["terminationGracePeriodSeconds"] > settings.drain_s + pre_stop
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("role", ["gateway", "prefill", "decode"])
def test_selectors_match_the_pods(role: str) -> None:
    deployment, *others = manifests(role)
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    for other in others:
        selector = other["spec"].get("podSelector") or other["spec"]["selector"]
        assert selector.get("matchLabels", selector) == labels
