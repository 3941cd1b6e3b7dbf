"""The workflows, which nothing here can run: valid by GitHub's schema, with few rights, and files and targets that exist."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.needs import needs

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs(file: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(file.read_text())["jobs"]
    return found


@pytest.mark.parametrize("schema", ["vendor.github-workflows", "custom.github-workflows-require-timeout"])
def test_github_s_schema_takes_them(schema: str, tmp_path: Path) -> None:
    needs("check_jsonschema")
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema]
    subprocess.run([*check, *map(str, FILES)], check=True, timeout=120, capture_output=True)
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(FILES[0].read_text().replace("timeout-minutes", "timeout-minuets"))
    assert subprocess.run([*check, str(wrong)], timeout=120, capture_output=True, check=False).returncode == 1


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_jobs_have_no_more_rights_than_they_use(file: Path) -> None:
    assert yaml.safe_load(file.read_text())["permissions"] == {"contents": "read"}
    for job in jobs(file).values():
        checkouts = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
        assert all(step["with"]["persist-credentials"] is False for step in checkouts)
        # What GitHub puts into a script is code; a variable is not.
        assert not [step for step in job["steps"] if "${{" in step.get("run", "")]
        signs = any(
            "cosign sign" in step.get("run", "") or "pypi-publish" in step.get("uses", "") for step in job["steps"]
        )
        assert not signs or job["permissions"]["id-token"] == "write"


def test_what_is_published_is_signed_and_lists_what_it_holds() -> None:
    """Each by the workflow's own identity, so that no job has a key or a password of an index."""
    release = jobs(ROOT / ".github" / "workflows" / "release.yml")
    steps = {name: "\n".join(yaml.safe_dump(step) for step in job["steps"]) for name, job in release.items()}
    assert set(steps) == {"test", "images", "chart", "package"}
    assert all(job["needs"] for name, job in release.items() if name != "test")  # nothing that fails is published
    assert all("cosign sign" in steps[name] and "cosign-installer" in steps[name] for name in ("images", "chart"))
    publish = release["package"]["steps"][-1]
    assert publish["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert publish["with"] == {"attestations": True}
    assert release["package"]["environment"] == "pypi"
    assert "--sbom=true" in steps["images"]
    assert "cyclonedx-py requirements" in steps["package"]
    assert "secrets." not in steps["package"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"dist/{project['name'].replace('-', '_')}-" in steps["package"]
    assert any(tool.startswith("cyclonedx-bom==") for tool in project["optional-dependencies"]["audit"])


def test_what_they_run_exists() -> None:
    text = "".join(file.read_text() for file in FILES)
    targets = re.findall(r"make (\w+)", text)
    makefile = (ROOT / "Makefile").read_text()
    assert targets
    assert all(f"\n{target}:" in makefile for target in targets)
    for path in re.findall(r"(?:deploy|\.ci)/[\w./]+", text):
        assert (ROOT / path).exists(), path
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    assert all(f"ARG {name}" in dockerfile for name in re.findall(r'--build-arg "(\w+)=', text))
