"""docker-compose.yml names only settings that exist, and its CPU profile serves when run as plain processes."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.gateway.settings import GatewaySettings
from services.planner.settings import PlannerSettings
from services.runtime.loading import load_settings
from services.worker.settings import WorkerServiceSettings
from tests.unit.deploy.chart import manifests, values

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
# The others with our image, `users` and `spaces`, run a program of Debian's.
OURS = [name for name, one in SERVICES.items() if "BATON_IMAGE" in one["image"] and "entrypoint" not in one]
PROFILES = sorted({profile for service in SERVICES.values() for profile in service.get("profiles", [])})
KINDS = {"gateway": GatewaySettings, "planner": PlannerSettings}


@pytest.mark.parametrize("name", OURS)
def test_variables_are_settings_of_the_service(name: str) -> None:
    service = SERVICES[name]
    (command,) = service["command"]
    kind = KINDS.get(command, WorkerServiceSettings)
    unknown = {variable for variable in service["environment"] if variable[6:].lower() not in kind.model_fields}
    assert not unknown
    plain = {key: str(value) for key, value in service["environment"].items() if not str(value).startswith(("$", "@"))}
    if kind is GatewaySettings:
        plain["BATON_API_KEYS"] = "key"
    settings = load_settings(kind, command=command, arguments=[], environment=plain)
    drain_s = getattr(settings, "drain_s", 0.0)
    assert drain_s < float(service["stop_grace_period"].removesuffix("s"))


@pytest.mark.parametrize("name", OURS)
def test_each_service_has_the_login_of_its_role_and_no_other(name: str) -> None:
    service = SERVICES[name]
    (role,) = service["command"]
    logins = [volume for volume in service["volumes"] if "login-" in volume]
    assert logins == [f"login-{role}:/logins:ro"]
    files = {value for key, value in service["environment"].items() if key.endswith("_CREDENTIALS")}
    assert files <= {f"/logins/{role}.nats", f"/logins/{role}.redis"}
    assert f"/logins/{role}.nats" in files
    assert "users" in service["depends_on"]


def test_the_key_for_metrics_is_the_gateway_s_and_prometheus_s_alone() -> None:
    mounted = {
        name: volume.partition(":")[2]
        for name, service in SERVICES.items()
        for volume in service.get("volumes", [])
        if volume.startswith("metrics-key:")
    }
    assert mounted == {"users": "/logins/metrics", "gateway": "/run/metrics:ro", "prometheus": "/run/metrics:ro"}
    assert SERVICES["gateway"]["environment"]["BATON_METRICS_KEY"] == "@/run/metrics/key"
    prometheus = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    assert prometheus["scrape_configs"][0]["authorization"] == {"credentials_file": "/run/metrics/key"}
    assert all("users" in SERVICES[name]["depends_on"] for name in ("gateway", "prometheus"))


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_bounded_and_has_no_privileges(name: str) -> None:
    service = SERVICES[name]
    assert service["mem_limit"]
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    image = re.sub(r"\$\{BATON_IMAGE:-(.*)\}", r"\1", service["image"])
    assert re.fullmatch(r"[\w./-]+:[\w.-]+", image)
    assert not image.endswith(":latest")


def test_no_service_lives_in_namespaces_that_end_with_another_one() -> None:
    """A PID namespace ends with its first process: that is one which does nothing."""
    joined = {
        SERVICES[name][kind]
        for name in SERVICES
        for kind in ("ipc", "pid")
        if "service:" in SERVICES[name].get(kind, "")
    }
    assert joined == {"service:spaces"}
    assert SERVICES["spaces"]["entrypoint"] == ["sleep", "infinity"]
    assert SERVICES["spaces"]["profiles"] == ["cpu", "gpu"]


def test_mounted_files_and_volumes_exist() -> None:
    sources = [volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])]
    files = [source for source in sources if source.startswith("./")]
    assert files
    assert [source for source in files if not (ROOT / source).exists()] == []
    assert {source for source in sources if source[0] not in "./$"} == set(COMPOSE["volumes"])


def test_the_image_has_the_folders_of_the_volumes_that_others_need_to_write() -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    for volume in SERVICES["users"]["volumes"]:
        target = volume.split(":")[1]
        made = target if not target.startswith("/logins/") else target.removeprefix("/logins/")
        assert re.search(rf"[ ]{re.escape(made)}[ ;\n]", dockerfile), target


def test_what_is_scraped_sent_and_asked_are_services() -> None:
    prometheus = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    targets = [
        target for job in prometheus["scrape_configs"] for each in job["static_configs"] for target in each["targets"]
    ]
    assert {target.split(":")[0] for target in targets} == {"gateway", "planner"}
    sources = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/baton.yml").read_text(encoding="utf-8"))
    tempo = yaml.safe_load((ROOT / "deploy/tempo/tempo.yml").read_text(encoding="utf-8"))
    collector = yaml.safe_load((ROOT / "deploy/otel/collector.yml").read_text(encoding="utf-8"))
    assert {source["url"] for source in sources["datasources"]} == {
        "http://prometheus:9090",
        f"http://tempo:{tempo['server']['http_listen_port']}",
    }
    received = tempo["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]
    assert collector["exporters"]["otlp"]["endpoint"] == received.replace("0.0.0.0", "tempo")
    assert {"prometheus", "tempo", "grafana", "otel-collector"} <= set(SERVICES)


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is in Debian's package of that name")
@pytest.mark.parametrize("profiles", [[], *([profile] for profile in PROFILES), PROFILES], ids=",".join)
def test_docker_compose_accepts_the_file(profiles: list[str]) -> None:
    wanted = [word for profile in profiles for word in ("--profile", profile)]
    command = ["docker-compose", "-f", str(ROOT / "docker-compose.yml"), *wanted, "config", "--quiet"]
    environment = {"BATON_API_KEYS": "key", "PATH": "/usr/bin:/bin:/usr/local/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# Grafana's own variables, as it fills them in.
FILLED = {"$__rate_interval": "1m", "$__range": "1h", "$__interval": "15s"}


def dashboard_queries() -> list[str]:
    """What the dashboards ask, with a value for each variable."""
    found = []
    for file in sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")):
        for panel in json.loads(file.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", []):
                if "expr" in target:
                    text = target["expr"]
                    for name, value in FILLED.items():
                        text = text.replace(name, value)
                    found.append(re.sub(r"\$\{?\w+\}?", ".*", text))
    return found


def autoscaling_queries() -> list[str]:
    """What KEDA asks for the chart."""
    made = manifests(values(autoscaling={"enabled": True}), "autoscaling")
    return [trigger["metadata"]["query"] for one in made for trigger in one["spec"].get("triggers", [])]


@pytest.mark.long
def test_cpu_profile_as_processes_answers_and_exposes_what_is_asked_for(tmp_path: Path) -> None:
    """With Prometheus (Debian's package), too: it scrapes both, evaluates every rule and answers every query."""
    dashboards, autoscaling = dashboard_queries(), autoscaling_queries()
    (tmp_path / "queries").write_text(json.dumps([*autoscaling, *dashboards]))
    script = [sys.executable, str(ROOT / "deploy" / "run-as-processes.py"), "--keep", str(tmp_path)]
    done = subprocess.run(
        [*script, "--queries", str(tmp_path / "queries")], capture_output=True, text=True, timeout=300
    )
    logs = "".join(log.read_text() for log in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stderr + logs
    assert "tokens:" in done.stdout
    assert {f"{name} is healthy" for name in ("gateway", "planner", "prefill-cpu", "decode-cpu")} <= set(
        done.stdout.splitlines()
    )
    assert "Permissions Violation" not in logs
    assert "ACL failure" not in logs

    exposed = set().union(*(families((tmp_path / f"{name}.metrics").read_text()) for name in ("gateway", "planner")))
    rules = [rule for name in ("rules", "alerts") for rule in rules_of(ROOT / "deploy" / "prometheus" / f"{name}.yml")]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    for asked in [*autoscaling, *dashboards, *(rule["expr"] for rule in rules)]:
        names = set(re.findall(r"\b(?:vllm:|baton:|baton_)[a-zA-Z0-9_:]+", asked))
        assert names <= exposed | recorded, f"{asked}: {names - exposed - recorded}"
    assert len(autoscaling) == 5
    if shutil.which("prometheus"):
        answers = json.loads((tmp_path / "answers.json").read_text())
        assert [len(answer) for answer in answers[: len(autoscaling)]] == [1] * 5  # KEDA wants one number, of each


def rules_of(file: Path) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]


def families(metrics: str) -> set[str]:
    """The names of a scrape's series."""
    names: set[str] = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", metrics, re.MULTILINE):
        names |= {f"{name}{suffix}" for suffix in ("_bucket", "_sum", "_count")} if kind == "histogram" else {name}
    return names
