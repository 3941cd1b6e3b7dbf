"""Baton as it is installed: the wheel alone, in a folder of its own, with the packages of this environment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.ports import own_port

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 90.0

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(build, check=True)
    (made,) = folder.glob("baton_serve-*.whl")
    return made


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
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BATON_", "OPENAI_", "PYTHON"))}
    return kept | {"PYTHONPATH": str(site)}


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
    port = own_port()
    up = await asyncio.create_subprocess_exec(
        *(sys.executable, str(site / "bin" / "baton"), "up", "--port", str(port), "--drain-s", "5"),
        cwd=here,
        env=environment(site),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        assert up.stdout is not None
        said = ""
        async with asyncio.timeout(PATIENCE_S):
            while "Baton serves demo" not in said:
                line = await up.stdout.readline()
                assert line, said
                said += line.decode()
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
        }
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
            answer = (await client.post("/v1/chat/completions", json=body)).json()
            page = await client.get("/")
        assert "Paris" in answer["choices"][0]["message"]["content"]
        assert "<html" in page.text
        done = await asyncio.to_thread(baton, site, here, "top", "--json")
        assert len(json.loads(done.stdout)["workers"]) == 2, done.stderr
        done = await asyncio.to_thread(baton, site, here, "doctor", "--json")
        assert [one for one in json.loads(done.stdout) if one["level"] == "fail"] == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            up.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(up.wait(), PATIENCE_S) == 0
