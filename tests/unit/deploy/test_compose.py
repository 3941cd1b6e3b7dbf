"""docker-compose.yml names only settings that exist, and its CPU profile serves when run as plain processes."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from common.config import GatewaySettings, WorkerServiceSettings, load_settings

ROOT = Path(__file__).resolve().parents[3]
SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
OURS = [name for name, service in SERVICES.items() if "environment" in service]


@pytest.mark.parametrize("name", OURS)
def test_variables_are_settings_of_the_service(name: str) -> None:
    service = SERVICES[name]
    kind = GatewaySettings if service["command"] == ["gateway"] else WorkerServiceSettings
    unknown = {variable for variable in service["environment"] if variable[6:].lower() not in kind.model_fields}
    assert not unknown
    plain = {key: str(value) for key, value in service["environment"].items() if not str(value).startswith("$")}
    if kind is GatewaySettings:
        plain["BATON_API_KEYS"] = "key"
    settings = load_settings(kind, command=service["command"][0], arguments=[], environment=plain)
    assert settings.drain_s < float(service["stop_grace_period"].removesuffix("s"))


def test_mounted_files_exist() -> None:
    sources = [volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])]
    files = [source for source in sources if source.startswith("./")]
    assert files
    assert [source for source in files if not (ROOT / source).is_file()] == []


def test_cpu_profile_as_processes_answers(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "deploy" / "run-as-processes.py"), "--keep", str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr + "".join(log.read_text() for log in tmp_path.glob("*.log"))
    assert "tokens:" in done.stdout
