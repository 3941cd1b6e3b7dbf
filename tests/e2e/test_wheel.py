"""Baton as it is installed: the wheel alone, in a folder of its own, with the packages of this environment."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.installed import IN_THE_ANSWER, PATIENCE_S, answer, build_wheel, serving, without_ours

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that stands for site-packages."""
    folder = tmp_path_factory.mktemp("site")
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(folder),
        str(wheel),
    ]
    subprocess.run(install, check=True)
    return folder


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Where the person is: a folder with a `common` and a `services` of its own."""
    for name in ("common", "services", "cli"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('not Baton')\n")
    return tmp_path


def environment(site: Path) -> dict[str, str]:
    return without_ours() | {"PYTHONPATH": str(site)}


def baton(site: Path, here: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(site / "bin" / "baton"), *arguments]
    return subprocess.run(command, cwd=here, env=environment(site), capture_output=True, text=True, check=False)


def test_one_name_gets_into_site_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    inside = {name.partition("/")[2] for name in names if name.startswith("baton_serve/")}
    assert {name for name in names if not name.startswith("baton_serve/") and ".dist-info/" not in name} == set()
    needed = {"demo/model.safetensors", "demo/tools.json", "deploy/nats/nats.conf", "deploy/redis/index.conf"}
    needed |= {
        "gateway/console/static/index.html",
        "gateway/placement/place.lua",
        "constraints.txt",
        "common/policy.toml",
    }
    assert needed <= inside
    assert not any(name.startswith(("tests/", "benchmarks/", "docs/")) for name in inside)


def test_help_and_errors(site: Path, here: Path) -> None:
    done = baton(site, here, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "  up " in done.stdout
    done = baton(site, here, "up", "--modle", "x")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "did you mean --model?" in done.stderr


async def test_up_answers_and_tools_find_it(site: Path, here: Path) -> None:
    program = [sys.executable, str(site / "bin" / "baton")]
    async with serving(program, here, environment(site)) as url:
        assert IN_THE_ANSWER in await answer(url)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            page = await client.get("/")
        assert "<html" in page.text
        done = await asyncio.to_thread(baton, site, here, "top", "--json")
        assert len(json.loads(done.stdout)["workers"]) == 2, done.stderr
        done = await asyncio.to_thread(baton, site, here, "doctor", "--json")
        assert [one for one in json.loads(done.stdout) if one["level"] == "fail"] == []
