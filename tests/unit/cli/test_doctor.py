"""`baton doctor` against real servers, servers set up wrongly, and none."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import redis.asyncio

from cli.doctor import machine, servers
from cli.doctor.devices import links
from cli.doctor.fleet import Gateways, findings
from cli.doctor.servers import check_nats, check_redis, shown
from cli.doctor.settings import DoctorSettings
from cli.doctor.spec import check as check_fields
from common import bus, store
from common.bus import NatsSettings
from common.messages import GatewayState, WorkerState
from common.peers import Peers
from common.settings import ROOT
from common.store import RedisSettings
from services.runtime.checks.finding import Finding
from services.runtime.checks.model import check_model
from services.runtime.permissions import Member, make_users
from services.runtime.servers import find_nats_server, run_nats, run_redis, stop
from services.worker.host_share import HostMB
from tests.fakes.workers import a_worker
from tests.gguf_files import write_gguf
from tests.models import build_tiny_model
from tests.pooling_models import build_pooling_model
from tests.ports import own_port
from tests.unit.engine.families.catalogue import CASES

NOWHERE = "127.0.0.1:1"
OURS = a_worker("d0", "decode").region
FP8 = msgspec.structs.replace(OURS, layout=msgspec.structs.replace(OURS.layout, dtype="float8_e4m3fn"))


async def all_of(findings: AsyncIterator[Finding]) -> dict[str, str]:
    return {finding.text: finding.level async for finding in findings}


def level_of(found: dict[str, str], part: str) -> str:
    (level,) = [level for text, level in found.items() if part in text]
    return level


async def test_servers_as_shipped_pass(nats_url: str, redis_url: str) -> None:
    nats, kept = await all_of(check_nats(nats_url)), await all_of(check_redis(redis_url))
    assert level_of(nats, "JetStream is on") == level_of(nats, "max_payload 8 MiB") == "ok"
    assert level_of(kept, "maxmemory-policy volatile-lfu") == level_of(kept, "functions load") == "ok"
    assert "fail" not in {*nats.values(), *kept.values()}


async def test_the_probe_leaves_no_library_behind(redis_url: str) -> None:
    await all_of(check_redis(redis_url))
    async with redis.asyncio.Redis.from_url(redis_url, protocol=2) as client:
        assert b"baton_doctor" not in await client.execute_command("FUNCTION", "LIST")
        assert not await client.function_list("baton_doctor")


@pytest.mark.parametrize(
    ("states", "level", "says"),
    [
        (
            [a_worker("d0", "decode", tokenizer_fingerprint="")],
            "ok",
            "1 workers and 1 gateways on the bus, 1 decode for 'tiny'",
        ),
        ([], "ok", "0 workers and 1 gateways on the bus, 0 decode for 'tiny'"),
        ([a_worker("d0", "decode")], "warn", "d0 gets no work: its tokenizer.json (tokenize) is not"),
        (
            [
                *(a_worker(name, "decode", tokenizer_fingerprint="") for name in ("d0", "d1")),
                a_worker("p0", "prefill", tokenizer_fingerprint="", region=FP8),
            ],
            "warn",
            "p0 gets no work: its KV is fp8, that of most or the first workers float32",
        ),
        (
            [a_worker("d0", "decode", tokenizer_fingerprint="", files_fingerprint="others")],
            "warn",
            "d0 gets no work: its files of 'tiny' (others) are not this gateway's",
        ),
        (
            [a_worker("d0", "decode", tokenizer_fingerprint="", incarnation=life) for life in (1, 2, 1)],
            "fail",
            "d0 gets no work: two processes have this name",
        ),
    ],
)
def test_workers_that_a_gateway_here_would_refuse_are_named_with_the_remedy(
    tmp_path: Path, states: list[WorkerState], level: str, says: str
) -> None:
    settings = DoctorSettings.model_validate({"model": build_tiny_model(tmp_path / "tiny", "llama")})
    peers, gateways = Peers(), Gateways()
    gateways.saw(GatewayState(gateway="g", incarnation=1))
    for state in states:
        peers.saw(msgspec.structs.replace(state, model="tiny"))
    [one] = findings(peers, gateways, settings)
    assert (one.check, one.level) == ("fleet", level)
    assert one.text.startswith(says)
    assert bool(one.remedy) is (level != "ok")


def test_two_gateways_with_one_name_are_a_failure_and_a_restart_is_not(tmp_path: Path) -> None:
    settings = DoctorSettings.model_validate({"model": tmp_path})
    gateways = Gateways()
    for life in (1, 1, 2, 2):
        gateways.saw(GatewayState(gateway="g", incarnation=life))
    assert [one.level for one in findings(Peers(), gateways, settings)] == ["ok"]
    gateways.saw(GatewayState(gateway="g", incarnation=1))
    [one] = findings(Peers(), gateways, settings)
    assert (one.level, one.text.partition(":")[0]) == ("fail", "gateway g")


async def test_absent_servers_fail_without_telling_secrets() -> None:
    for found in (
        await all_of(check_nats(f"nats://me:hush@{NOWHERE}")),
        await all_of(check_redis(f"redis://me:hush@{NOWHERE}")),
    ):
        assert list(found.values()) == ["fail"]
        assert "hush" not in str(found)
        assert NOWHERE in str(found)


async def test_servers_that_nobody_named_may_be_absent() -> None:
    for found in (
        await all_of(check_nats(f"nats://{NOWHERE}", is_named=False)),
        await all_of(check_redis(f"redis://{NOWHERE}", is_named=False)),
    ):
        assert list(found.values()) == ["ok"]
        assert "`baton up` starts its own" in str(found)


async def test_a_nats_server_without_jetstream_fails() -> None:
    port = own_port()
    server = await asyncio.create_subprocess_exec(
        *(str(find_nats_server()), "-a", "127.0.0.1", "-p", str(port)), stderr=asyncio.subprocess.PIPE
    )
    try:
        assert server.stderr is not None
        await server.stderr.readuntil(b"Server is ready")
        found = await all_of(check_nats(f"nats://127.0.0.1:{port}"))
    finally:
        await stop(server)
    assert level_of(found, "JetStream is off") == "fail"
    assert level_of(found, "max_payload is 1.0 MiB") == "warn"


async def test_a_wrong_eviction_policy_is_named(tmp_path: Path) -> None:
    async with run_redis(data_dir=tmp_path) as server:
        async with redis.asyncio.Redis.from_url(server.url) as client:
            await client.config_set("maxmemory-policy", "allkeys-lru")
        assert level_of(await all_of(check_redis(server.url)), "allkeys-lru") == "warn"


async def test_nats_is_not_redis(nats_url: str, redis_url: str) -> None:
    assert "fail" in (await all_of(check_redis(nats_url.replace("nats://", "redis://")))).values()
    assert "fail" in (await all_of(check_nats(redis_url.replace("redis://", "nats://")))).values()


def problems(folder: Path) -> list[str]:
    return [finding.text for finding in check_model(folder) if finding.level == "fail"]


def test_models(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "tiny", "llama")
    weights = folder / "model.safetensors"
    assert problems(folder) == []
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert problems(folder) == [f"model.safetensors has {len(whole) - 1} bytes of {len(whole)}"]
    weights.write_bytes(b"short")
    assert problems(folder) == ["model.safetensors has no valid header"]
    weights.write_bytes(whole)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert problems(folder) == ["model-2.safetensors is missing"]
    (folder / "config.json").write_text("{")
    (folder / "tokenizer.json").unlink()
    assert len(problems(folder)) == 3
    assert "no config.json there" in problems(tmp_path / "none")[0]


def test_a_folder_that_is_asked_about_alone_needs_no_servers(tmp_path: Path) -> None:
    folder, somewhere = build_tiny_model(tmp_path / "tiny", "llama"), str(tmp_path / "nothing-runs-here")
    good, findings = run_doctor(str(folder), "--data-dir", somewhere)
    assert good == 0, findings
    said = {finding["text"] for finding in findings}
    assert any(text.startswith("LlamaForCausalLM is served") for text in said)
    assert any("parameters, mostly F32" in text for text in said)
    assert any("they fit" in text for text in said)
    assert "all fields are known: 2 layers, 1024 positions" in said
    config = folder / "config.json"
    plain = config.read_text()
    config.write_text(json.dumps(json.loads(plain) | {"clip_logits": 3}))
    [unknown] = check_fields(folder)
    assert (unknown.level, "config.json: clip_logits" in unknown.text) == ("fail", True)
    config.write_text(plain.replace("LlamaForCausalLM", "FooForCausalLM").replace('"llama"', '"foo"'))
    [failed] = problems(folder)
    assert failed == f"{config}: FooForCausalLM is not served (docs/models.md)"


def test_fields_of_a_model_of_vectors_are_read_as_its_worker_does(tmp_path: Path) -> None:
    folder = build_pooling_model(tmp_path / "vectors")
    [known] = check_fields(folder)
    assert (known.level, known.text.startswith("all fields are known: ")) == ("ok", True)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"clip_logits": 3}))
    [unknown] = check_fields(folder)
    assert (unknown.level, "config.json: clip_logits" in unknown.text) == ("fail", True)


@pytest.mark.parametrize(
    ("ranks", "device", "level", "said"),
    [
        (2, "cpu", "ok", "--tensor-parallel-size 2: a rank has 2 of 4 attention heads and 1 of 2 key and value heads"),
        (4, "cpu", "ok", "1 of 2 key and value heads, which 2 ranks each keep"),
        (3, "cpu", "fail", "--tensor-parallel-size 3: ranks can't share 4 attention heads"),
        (2, "cuda", "ok", "--tensor-parallel-size 2: a rank has 2 of 4 attention heads and 1 of 2 key and value heads"),
    ],
)
def test_what_each_rank_would_have(ranks: int, device: str, level: str, said: str, tmp_path: Path) -> None:
    *_, found = check_fields(build_tiny_model(tmp_path / "tiny", "llama"), device, ranks)
    assert (found.level, said in found.text) == (level, True)


@pytest.mark.parametrize(
    ("stages", "level", "said"),
    [
        (2, "ok", "--pipeline-parallel-size 2: stages have the layers 0 to 0, 1 to 1"),
        (3, "fail", "--pipeline-parallel-size 3: a stage of 0 of 2 layers keeps no keys and values"),
    ],
)
def test_which_layers_each_stage_would_have(stages: int, level: str, said: str, tmp_path: Path) -> None:
    *_, found = check_fields(build_tiny_model(tmp_path / "tiny", "llama"), stages=stages)
    assert (found.level, found.text) == (level, said)


@pytest.mark.parametrize(
    ("ranks", "whole_experts", "level", "said"),
    [
        (2, 1, "fail", "--tensor-parallel-size 2: ranks can't share 5 experts"),
        (2, 0, "ok", "of each expert"),
    ],
)
def test_what_of_the_experts_each_rank_would_have(
    ranks: int, whole_experts: int, level: str, said: str, tmp_path: Path
) -> None:
    mixtral = next(case for case in CASES if case.name == "mixtral")
    *_, found = check_fields(mixtral.build(tmp_path), "cpu", ranks, whole_experts=whole_experts)
    assert (found.level, said in found.text) == (level, True)


def test_gguf_files(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "tiny", "llama")
    file = write_gguf(folder, tmp_path / "model.gguf")
    assert problems(file) == []
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert "the file has" in problems(file)[0]
    assert problems(write_gguf(folder, tmp_path / "other.gguf", pre="ours")) == [
        f"{tmp_path / 'other.gguf'}: tokenizer.ggml.pre = 'ours' is not supported"
    ]
    assert "none.gguf" in problems(tmp_path / "none.gguf")[0]


def test_packages_are_compared_with_the_constraints(tmp_path: Path) -> None:
    file = tmp_path / "constraints.txt"
    file.write_text("# why\nmsgspec==0.0.1\nnot-installed==1\n")
    (found,) = [finding for finding in machine.python_and_packages(file) if finding.level == "warn"]
    assert found.text.startswith("msgspec ")
    assert found.text.endswith("tested with 0.0.1")


@pytest.mark.parametrize(("way", "level"), [("NV18", "ok"), ("PHB", "warn")])
def test_links(way: str, level: str) -> None:
    table = f"\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \t{way}\t0-15\nGPU1\t{way}\t X \t0-15\n\nLegend:\n"
    assert links(table, 2).level == level


@pytest.mark.parametrize(
    ("asked", "level"), [("0", "ok"), ("4000", "ok"), ("900:shared", "ok"), ("1100:shared", "fail")], ids=str
)
def test_shared_host_memory_is_compared_with_the_place_for_it(
    asked: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: (1000 << 20, 0, 1000 << 20))
    found = {finding.check: finding.level for finding in machine.limits(HostMB.parse(asked))}
    assert found["shm"] == level


def test_secrets_are_not_shown() -> None:
    assert shown("redis://me:p@ss@host:1/0") == "redis://host:1"


def run_doctor(*options: str) -> tuple[int, list[dict[str, str]]]:
    command = [sys.executable, "-m", "cli.doctor", "--json", "--port", "0", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.quick("nats")  # 0 where all is well: a folder alone, above
@pytest.mark.parametrize("failing", [["nats"], []], ids=["nats", "nothing"])
def test_the_exit_code_says_whether_anything_failed(failing: list[str], nats_url: str, redis_url: str) -> None:
    code, findings = run_doctor("--nats-url", f"nats://{NOWHERE}" if failing else nats_url, "--redis-url", redis_url)
    assert code == len(failing), findings
    assert [finding["check"] for finding in findings if finding["level"] == "fail"] == failing
    assert all(finding["remedy"] for finding in findings if finding["level"] != "ok")


async def test_an_observer_may_examine_servers_with_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "SLOW_MS", math.inf)  # a busy machine is no finding here
    users = make_users([Member("observer")], tmp_path / "users")
    async with (
        run_nats(data_dir=tmp_path / "nats", extra=users.nats) as nats,
        run_redis(data_dir=tmp_path / "redis", users=users.redis) as redis,
    ):
        seen = NatsSettings(url=nats.address, credentials=users.nats_file("observer"))
        kept = RedisSettings(url=redis.address, credentials=users.redis_file("observer"))
        assert "fail" not in (await all_of(check_nats(nats.address, bus.identity_of(seen)))).values()
        assert {*(await all_of(check_redis(redis.address, store.identity_of(kept)))).values()} == {"ok"}
        assert "fail" in (await all_of(check_nats(nats.address))).values()
        assert "fail" in (await all_of(check_redis(redis.address))).values()
