"""`baton up org/name` against a stand-in of the hub: fetched once, served under its name, left alone by `rm`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.hub import Hub, hub_served
from tests.ports import own_port
from tests.unit.house.measures import ROOT

pytestmark = pytest.mark.long
NAMES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors")


def started(hub: Hub, folder: Path, *words: str) -> subprocess.Popen[str]:
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf"), "PYTHONPATH": str(ROOT)}
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_HUB_CACHE")}
    command = [sys.executable, "-m", "cli", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    return subprocess.Popen(command, cwd=folder, env=environment | variables, text=True, **pipes)  # type: ignore[call-overload]


def test_a_model_is_fetched_served_by_its_name_and_kept_while_it_is(tmp_path: Path) -> None:
    with hub_served() as hub:
        hub.add("org/demo", {name: (ROOT / "demo" / name).read_bytes() for name in NAMES})
        port = own_port()
        up = started(hub, tmp_path, "up", "org/demo", "--port", str(port), "--max-model-len", "256")
        try:
            assert up.stdout is not None
            said = ""
            while "Baton serves org/demo" not in said:
                line = up.stdout.readline()
                assert line, said
                said += line
            assert "fetching org/demo@" in said
            url = f"http://127.0.0.1:{port}/v1"
            assert [one["id"] for one in httpx.get(f"{url}/models", timeout=60).json()["data"]] == ["org/demo"]
            body = {"model": "org/demo", "prompt": "Hello", "max_tokens": 8, "temperature": 0}
            assert httpx.post(f"{url}/completions", json=body, timeout=60).json()["choices"][0]["text"]
            listed, _ = started(hub, tmp_path, "list").communicate(timeout=60)
            assert listed.splitlines()[1].split()[-1] == "served"
            shown, _ = started(hub, tmp_path, "show", "org/demo").communicate(timeout=60)
            assert re.search(r"^fit +needs .* of weights", shown, re.MULTILINE)
            refused, _ = started(hub, tmp_path, "rm", "org/demo").communicate(timeout=60)
            assert re.search(r"org/demo: it is served by baton up \(process \d+\), .*: stop that first", refused)
        finally:
            up.terminate()
            up.communicate(timeout=60)
        removed, _ = started(hub, tmp_path, "rm", "org/demo").communicate(timeout=60)
        assert removed == "removed org/demo: 16 MB are free again\n"
        assert [*(tmp_path / "hf" / "hub").glob("models--*")] == []
