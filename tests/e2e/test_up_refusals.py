"""Refusals of `baton up`, each in one line."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.e2e.stack import Start


async def test_two_with_one_data_folder_are_refused(start: Start) -> None:
    async with start("--device", "fake") as first:
        await first.says("starting nats")
        first.process.send_signal(signal.SIGSTOP)  # else it may serve before the other one looks
        async with start("--device", "fake") as second:
            code, said = await second.ends()
            assert (code, len(said)) == (2, 1)
            assert "another `baton up` uses it" in said[0]
        first.process.send_signal(signal.SIGCONT)
        await first.says("Baton serves")
        async with start("--device", "fake", "--port", first.url.rpartition(":")[2]) as second:
            code, said = await second.ends()
            assert (code, len(said)) == (2, 1)
            assert said[0].startswith("baton: Baton runs here since ")
            assert first.url in said[0]


async def test_what_can_be_known_is_refused_before_anything_starts(start: Start, model: Path, tmp_path: Path) -> None:
    spoilt = shutil.copytree(model, tmp_path / "spoilt")
    (spoilt / "config.json").write_text('{"architectures": ["FooForCausalLM"]}')
    async with start("--model", str(spoilt), "--max-model-len", "100000") as up:
        code, said = await up.ends()
        assert code == 2, said
        assert said == [f"baton: {spoilt / 'config.json'}: FooForCausalLM is not served (docs/models.md)"]
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("prefill", ["1", pytest.param("0", marks=pytest.mark.long)])
async def test_what_only_a_worker_sees_is_one_line_and_stops_everything(
    start: Start, model: Path, tmp_path: Path, prefill: str
) -> None:
    unknown = shutil.copytree(model, tmp_path / "unknown")
    fields = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps(fields | {"clip_logits": 3}))
    async with start("--model", str(unknown), "--prefill", prefill) as up:
        code, said = await up.ends()
        assert code == 2
        assert said[-2] == "stopped"
        named = "config.json: clip_logits = 3 is not supported by this family; remove the field"
        if sys.platform == "linux":  # elsewhere there is no nursery, which reads it before any worker is born
            assert said[-1].startswith(f"baton: --model {unknown}: {named}")
            assert not list((tmp_path / "data" / "logs").glob("*-0.log"))
        else:
            assert said[-1].startswith(("baton: decode-0 ended", "baton: prefill-0 ended"))
            assert named in said[-1]


@pytest.mark.long
async def test_a_device_that_is_not_there_is_one_line(start: Start) -> None:
    async with start("--prefill", "0", "--device", "cuda:99") as up:
        code, said = await up.ends()
        assert (code, len(said)) == (2, 1)
        assert said[0].startswith("baton: --device cuda:99: ")


@pytest.mark.quick(first=1)
@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--model", "/no/such/folder"], "--model /no/such/folder: no config.json"),
        (["--decod", "2"], "unknown option --decod (did you mean --decode?)"),
        (["--nnodes", "2"], "unknown option --nnodes (it is an option of baton prefill, baton decode, "),
        (["--prefill", "many"], "--prefill (BATON_PREFILL)"),
        (["--host", "0.0.0.0"], "set BATON_API_KEYS"),
        (["--tool-call-parser", "hermse"], "'hermse' is no parser, did you mean 'hermes'?"),
        (["--chat-template", "absent.jinja"], "--chat-template absent.jinja: no such file"),
    ],
)
async def test_a_wrong_option_is_one_line(start: Start, options: list[str], part: str) -> None:
    async with start(*options) as up:
        code, said = await up.ends()
        assert code == 2
        assert len(said) == 1
        assert part in said[0]


async def test_a_port_in_use_is_one_line(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        async with start("--port", port) as up:
            code, said = await up.ends()
            assert code == 2
            assert len(said) == 1
            assert said[0].startswith(f"baton: --port {port}: in use")
