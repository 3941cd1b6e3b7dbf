"""A family of an installed package: the one that docs/models.md shows, from its entry point to its layers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from common.settings import ROOT
from engine.families import read_model_spec
from services.runtime.checks.model import check_model

ASKED = """
import json, sys
from pathlib import Path
from engine.families import read_model_spec
from modelfiles.served import refusal
from services.runtime.checks.model import check_model

llama, pencil = map(Path, sys.argv[1:])
assert "pencil" not in sys.modules
said = [finding.said for finding in check_model(pencil)]
try:
    print(json.dumps([refusal(["PencilForCausalLM"]), said[0], read_model_spec(pencil) == read_model_spec(llama)]))
except ValueError as error:
    print(json.dumps(["", said[0], str(error)]))
"""


def blocks(language: str) -> list[str]:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The documented package, as pip leaves it."""
    (project,), (module,) = blocks("toml"), blocks("python")
    assert len(project.splitlines()) + len(module.splitlines()) <= 20
    told = tomllib.loads(project)["project"]
    folder = tmp_path / "site"
    info = folder / f"{told['name'].replace('-', '_')}-{told['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {told['name']}\nVersion: {told['version']}\n")
    points = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in named.items())
        for group, named in told["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(points))
    (folder / "pencil.py").write_text(module)
    return folder


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """The demo, and the same as a Pencil."""
    made = shutil.copytree(ROOT / "demo", tmp_path / "pencil")
    fields = json.loads((made / "config.json").read_text())
    fields |= {
        "architectures": ["PencilForCausalLM"],
        "model_type": "pencil",
        "ffn_size": fields.pop("intermediate_size"),
    }
    (made / "config.json").write_text(json.dumps(fields))
    return ROOT / "demo", made


def told(models: tuple[Path, Path], *paths: Path) -> list[str | bool]:
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *paths)))}
    command = [sys.executable, "-c", ASKED, *map(str, models)]
    done = subprocess.run(command, env=variables, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
    found: list[str | bool] = json.loads(done.stdout)
    return found


def test_its_name_is_known_without_its_code_and_its_function_reads_the_model(
    installed: Path, models: tuple[Path, Path]
) -> None:
    assert told(models, installed) == ["", "PencilForCausalLM is served", True]


def test_without_it_the_model_is_refused(models: tuple[Path, Path]) -> None:
    """This process has no package."""
    first = next(iter(check_model(models[1])))
    assert "PencilForCausalLM is not served" in first.said
    with pytest.raises(ValueError, match="PencilForCausalLM is not served"):
        read_model_spec(models[1])


def test_one_that_fails_is_named(installed: Path, models: tuple[Path, Path]) -> None:
    (installed / "pencil.py").write_text("import nothing_that_there_is\n")
    error = told(models, installed)[2]
    assert "PencilForCausalLM: baton.families names pencil:read_pencil, which fails: No module named" in str(error)
