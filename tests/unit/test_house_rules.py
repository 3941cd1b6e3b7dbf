"""Rules of the house that a machine can check."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from common.messages import AttemptMessage, Job, Tokens, WorkerMessage
from services.settings_table import render

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("services", "gateway", "prefill", "decode", "worker", "engine", "kvtransfer", "common")
LONGEST_MODULE = 560
COMMON = {"blocks", "bus", "config", "errors", "job_queue", "lifecycle", "messages", "peers", "servers", "store"}
COMMON |= {"access", "subjects", "telemetry", "tls", "tracing"}
COMMON_LINES = 3_060  # shared code is everybody's burden: what one package alone needs lives there


def modules(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def test_every_setting_is_documented() -> None:
    assert (ROOT / "docs/configuration.md").read_text() == render(), (
        "run python -m services.settings_table > docs/configuration.md"
    )


def test_no_module_outgrows_a_reader() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules(*PACKAGES)}
    assert {name: length for name, length in lengths.items() if length > LONGEST_MODULE} == {}


def test_common_stays_small_and_known() -> None:
    files = modules("common")
    assert {path.stem for path in files} - {"__init__"} <= COMMON
    assert sum(len(path.read_text().splitlines()) for path in files) <= COMMON_LINES


def test_whoever_says_something_about_a_request_says_its_trace() -> None:
    kinds = {kind.__name__ for kind in (*AttemptMessage.__subclasses__(), *WorkerMessage.__subclasses__(), Job, Tokens)}
    said: dict[str, bool] = {}
    for path in modules("gateway", "worker", "prefill", "decode", "services"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds:
                place = f"{path.relative_to(ROOT)}:{node.lineno} {node.func.id}"
                said[place] = "traceparent" in {keyword.arg for keyword in node.keywords}
    assert {place.partition(" ")[2] for place in said} == kinds - {"WorkerMessage"}
    assert [place for place, with_trace in said.items() if not with_trace] == []


def test_no_module_is_a_drawer() -> None:
    assert [path for path in modules(*PACKAGES) if path.stem in ("util", "utils", "helpers", "misc")] == []


def test_nothing_is_pickled() -> None:
    for path in modules(*PACKAGES):
        text = path.read_text()
        assert "import pickle" not in text, path
        assert "torch.load" not in text.replace("never pickle/torch.load", ""), path


def test_the_environment_is_read_in_one_place() -> None:
    readers = {str(path.relative_to(ROOT)) for path in modules(*PACKAGES) if "os.environ" in path.read_text()}
    allowed = {
        "common/config.py",
        "services/up/child.py",  # hands the environment on to its children
        "kvtransfer/ucx_wire.py",  # UCX's own variables
        "engine/kernels/backend.py",  # Triton's own variable
        "services/otlp/collector.py",  # OpenTelemetry's own variables
    }
    assert readers <= allowed


def test_no_distribution_claims_our_names() -> None:
    assert set(PACKAGES) & set(metadata.packages_distributions()) == set()


@pytest.mark.parametrize(
    "module",
    [f"services.{name}.__main__" for name in ("gateway", "up", "chat", "bench", "top", "doctor", "planner", "keys")],
)
def test_the_front_door_has_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_no_address_of_a_registry_or_of_a_machine_is_in_the_repository() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    names = ["Makefile", "pyproject.toml", "constraints.txt", ".ci/run"]
    for name in [path for path in names if path in listed]:
        text = (ROOT / name).read_text()
        assert "index-url" not in text, name
        assert "file://" not in text, name
