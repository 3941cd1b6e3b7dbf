"""What deploy/Dockerfile copies is enough: every service can be imported from a copy of just that."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cli.requirements import requirements

ROOT = Path(__file__).resolve().parents[3]
IMPORTS = """
import importlib, pathlib, sys
for package in ("gateway", "prefill", "decode", "services", "planner", "cli"):
    for file in sorted(pathlib.Path(package).rglob("*.py")):
        name = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        importlib.import_module(name)
        assert pathlib.Path(sys.modules[name].__file__).is_relative_to(pathlib.Path.cwd())
from services.runtime.servers import DEPLOY
assert (DEPLOY / "nats" / "nats.conf").is_file() and (DEPLOY / "redis" / "index.conf").is_file()
print("all there")
"""


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A folder with what the Dockerfile's last stage copies from the repository."""
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    last = dockerfile[dockerfile.rindex("\nFROM ") :]
    sent = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for sources in re.findall(r"^COPY (?!--)(.+) \S+$", last, re.MULTILINE):
        for source in sources.split():
            assert f"!{source}" in sent, f"docker build does not get {source}: name it in .dockerignore"
            target = tmp_path / source
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, target)  # and what is compiled of it: the test is about files
            else:
                shutil.copy(ROOT / source, target)
    return tmp_path


def test_the_extras_that_images_are_built_with_exist() -> None:
    texts = [(ROOT / "deploy" / name).read_text(encoding="utf-8") for name in ("Dockerfile", "kserve/runtime.yaml")]
    given = re.findall(r'EXTRAS="?([\w ]+)"?', "\n".join(texts))
    assert len(given) == 3
    for extras in given:
        assert requirements(extras.split())


@pytest.mark.long
def test_every_service_is_there_with_what_it_imports_and_reads(image: Path) -> None:
    environment = {"PYTHONPATH": str(image), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], cwd=image, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "all there\n", done.stderr
    assert (image / "demo" / "config.json").is_file()
    assert os.access(image / "baton", os.X_OK)
