"""Settings: who wins, and what a person is told when one is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from cli.chat.settings import ChatSettings
from common.settings import ROOT, ConfigError
from services.gateway.settings import GatewaySettings
from services.planner.settings import PlannerOptions, PlannerSettings
from services.runtime import foreign
from services.runtime.commands import COMMANDS, known_names, settings_of
from services.runtime.flags import ARGUMENTS, COMMON, GROUPS, flag_of
from services.runtime.loading import as_environment, load_settings
from services.runtime.removed import REMOVED, removed_from
from services.runtime.settings import ServiceLevelOptions, no_model
from services.up.settings import UpSettings
from services.worker.options import WorkerOptions
from services.worker.settings import WorkerServiceSettings


def load(
    *arguments: str,
    kind: type[BaseModel] = WorkerServiceSettings,
    environment: dict[str, str] | None = None,
    command: str = "test",
) -> BaseModel:
    return load_settings(kind, command=command, arguments=arguments, environment=environment or {})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "baton.toml"
    path.write_text("max_sequences = 11\nblock_size = 32\nthreads = 3\nport = 1234\n")
    return path


def test_a_flag_beats_a_variable_beats_the_file_beats_the_default(file: Path) -> None:
    settings = load(
        *("--config", str(file), "--max-sequences", "13"),
        environment={"BATON_MAX_SEQUENCES": "12", "BATON_BLOCK_SIZE": "64"},
    )
    assert isinstance(settings, WorkerServiceSettings)
    assert (settings.max_sequences, settings.block_size, settings.threads) == (13, 64, 3)
    assert settings.max_batch_tokens == WorkerServiceSettings.model_fields["max_batch_tokens"].default


def test_the_file_may_be_named_by_a_variable_and_serve_several_services(file: Path) -> None:
    gateway = load(kind=GatewaySettings, environment={"BATON_CONFIG": str(file)})
    assert isinstance(gateway, GatewaySettings)
    assert gateway.port == 1234


def test_a_variable_that_is_true_can_be_denied_by_a_flag() -> None:
    on = load(kind=UpSettings, environment={"BATON_PLANNER": "true"})
    off = load("--no-planner", kind=UpSettings, environment={"BATON_PLANNER": "true"})
    assert (on.planner, off.planner) == (True, False)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "environment", "told"),
    [
        (["--max-sequence", "4"], {}, "unknown option --max-sequence (did you mean --max-sequences?)"),
        (
            ["--max-sequences", "none"],
            {},
            "--max-sequences (BATON_MAX_SEQUENCES): a whole number is needed, not 'none'",
        ),
        ([], {"BATON_MAX_SEQUENCES": "-1"}, "--max-sequences (BATON_MAX_SEQUENCES): 0 or more is needed, not '-1'"),
        (
            ["--block-size", "17"],
            {},
            "--block-size (BATON_BLOCK_SIZE): one of auto, 8, 16, 32, 64, 128, 256, 512, 1024 is needed, not 17",
        ),
        (["--dtype", "int1"], {}, "--dtype (BATON_DTYPE): one of auto, float32, bfloat16, float16 is needed"),
        (["--worker-id", "a.b"], {}, "--worker-id (BATON_WORKER_ID): "),
        (["--drain-s", "-1"], {}, "--drain-s (BATON_DRAIN_S): "),
        (["--threads"], {}, "argument --threads: expected one argument"),
        (["--config", "/no/such.toml"], {}, "--config /no/such.toml: No such file"),
    ],
)
def test_what_is_wrong_is_named(arguments: list[str], environment: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(*arguments, environment=environment)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("by", ["flag", "variable", "file"])
def test_what_is_gone_is_refused_with_what_holds_now(by: str, tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("plan_hold_s = 3\n")
    arguments = {"flag": ("--plan-hold-s", "3"), "file": ("--config", str(file))}.get(by, ())
    environment = {"BATON_PLAN_HOLD_S": "3"} if by == "variable" else {}
    told = {"flag": "--plan-hold-s", "variable": "BATON_PLAN_HOLD_S", "file": f"--config {file}: plan_hold_s"}[by]
    for command, kind in (("up", UpSettings), ("planner", PlannerSettings)):
        with pytest.raises(ConfigError) as raised:
            load(*arguments, kind=kind, command=command, environment=environment)
        assert str(raised.value) == f"{told}: a constant since 0.2: 10 s"


def test_what_is_gone_elsewhere_stops_nobody_and_nothing_is_both_gone_and_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert load(kind=GatewaySettings, command="gateway", environment={"BATON_PLAN_HOLD_S": "3"})
    assert capsys.readouterr().err == ""
    for command in COMMANDS:
        kind = settings_of(command)
        assert removed_from(command).keys() & set(kind.model_fields if kind else ()) <= set(ARGUMENTS)
    assert {command for commands in REMOVED for command in commands} <= COMMANDS.keys()


def test_an_unknown_variable_is_warned_of_and_stops_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    load(environment={"BATON_MAX_SEQUENCE": "4"})
    said = capsys.readouterr().err
    assert said == "baton: warning: unknown variable BATON_MAX_SEQUENCE (did you mean BATON_MAX_SEQUENCES?)\n"


@pytest.mark.parametrize("flag", ["--api-keys", "--admin-key"])
def test_keys_may_lie_in_a_file_and_are_warned_of_on_a_command_line(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = flag[2:].replace("-", "_")
    file = tmp_path / "keys"
    file.write_text("one\n two \n\n")
    assert getattr(load(flag, f"@{file}", kind=GatewaySettings), name) == "one,two"
    hidden = {f"BATON_{name.upper()}": f"@{file}"}
    assert getattr(load(kind=GatewaySettings, environment=hidden), name) == "one,two"
    assert capsys.readouterr().err == ""
    load(flag, "sk-secret", kind=GatewaySettings)
    said = capsys.readouterr().err
    assert flag in said
    assert "sk-secret" not in said
    with pytest.raises(ConfigError, match="No such file"):
        load(flag, "@/no/such", kind=GatewaySettings)


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--kv-memory-mb", "auto"], "kv_memory_mb", 0),
        (["--local-prefill-tokens", "auto"], "local_prefill_tokens", -1),
        (["--batch-store-mb", "off"], "batch_store_mb", 0),
        (["--max-num-seqs", "7"], "max_sequences", 7),
        (["--max-num-batched-tokens", "900"], "max_batch_tokens", 900),
        (["--api-key", "k"], "api_keys", "k"),
        (["-tp", "2", "-pp", "1", "--enable-auto-tool-choice", "--max-model-len=99"], "tensor_parallel_size", "2"),
        (["docs"], "model", Path("docs")),
    ],
)
def test_words_for_numbers_and_the_options_of_vllm(arguments: list[str], name: str, value: object) -> None:
    assert getattr(load_settings(UpSettings, command="up", arguments=arguments, environment={}), name) == value


def test_nothing_is_not_auto_where_a_person_writes_it() -> None:
    for flag in ("--kv-memory-mb", "--max-model-len", "--block-size"):
        with pytest.raises(ConfigError, match=f"{flag} 0: more than 0 is needed, or auto"):
            load_settings(UpSettings, command="up", arguments=[flag, "0"], environment={})
    assert (
        load_settings(UpSettings, command="up", arguments=[], environment={"BATON_KV_MEMORY_MB": "0"}).kv_memory_mb == 0
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-pp", "0"], "--pipeline-parallel-size (BATON_PIPELINE_PARALLEL_SIZE): 1 to 64 stages are needed"),
        (["--gpu-memory-utilization", "0.9"], "unknown option --gpu-memory-utilization (--kv-memory-mb"),
        (["--tokenizer=x"], "unknown option --tokenizer (it is the one in --model's folder)"),
        (["--enable-lora"], "unknown option --enable-lora (LoRA is not served: merge the adapter into the weights"),
        (["--lora-modules", "a=b"], "unknown option --lora-modules (LoRA is not served"),
        (["--num-speculative-tokens", "4"], "unknown option --num-speculative-tokens (--speculative-config suffix:K)"),
        (["--prefil", "2"], "unknown option --prefil (did you mean --prefill?)"),
    ],
)
def test_options_of_vllm_that_mean_something_else_are_told(arguments: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_settings(UpSettings, command="up", arguments=arguments, environment={})
    assert told in str(raised.value)


def test_help_is_short_and_help_all_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            load_settings(UpSettings, command="up", arguments=[flag], environment={})
        shown[flag] = capsys.readouterr().out
    assert len(shown["--help"].splitlines()) < 50
    assert [flag for flag in map(flag_of, COMMON["up"]) if flag not in shown["--help"]] == []
    everything = shown["--help-all"]
    assert [name for name in UpSettings.model_fields if f"{flag_of(name)[2:]}" not in everything] == []
    assert "(default: )" not in everything
    assert "--no-planner" not in everything
    assert "(default: auto)" in everything
    for title, _ in GROUPS:
        assert f"\n{title}:" in everything


@pytest.mark.parametrize("command", COMMON)
def test_common_options_are_options(command: str) -> None:
    kind = settings_of(command)
    assert kind is not None
    assert set(COMMON[command]) <= set(kind.model_fields)


def test_what_vllm_calls_otherwise_is_no_option_here() -> None:
    flags = {flag_of(name) for name in UpSettings.model_fields}
    assert flags & {*foreign.ALIASES, *foreign.IS_SO, *foreign.ELSEWHERE} == set()
    assert set(foreign.ALIASES.values()) <= known_names()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("treads = 2", "unknown setting 'treads' (did you mean threads?)"),
        ("threads = [2]", "--threads (BATON_THREADS): a whole number is needed"),
        ("threads = ", "Invalid value"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(tmp_path: Path, content: str, told: str) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(content)
    with pytest.raises(ConfigError) as raised:
        load("--config", str(file))
    assert told in str(raised.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1"])
def test_an_open_address_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="is not loopback: set BATON_API_KEYS"):
        load("--host", host, "--api-keys", " , ", kind=GatewaySettings)
    settings = load("--host", host, "--api-keys", "one, two", kind=GatewaySettings)
    assert isinstance(settings, GatewaySettings)
    assert settings.keys == ("one", "two")


@pytest.mark.parametrize("kind", [GatewaySettings, WorkerServiceSettings, UpSettings, ChatSettings])
def test_settings_are_frozen_described_and_have_valid_defaults(kind: type[BaseModel]) -> None:
    settings = load(kind=kind)
    assert kind.model_validate(settings.model_dump()) == settings
    assert all(field.description for field in kind.model_fields.values())
    with pytest.raises(ValueError, match="frozen"):
        setattr(settings, next(iter(kind.model_fields)), "other")


@pytest.mark.parametrize("kind", [GatewaySettings, WorkerOptions])
def test_what_up_hands_on_is_what_the_service_reads(kind: type[BaseModel]) -> None:
    options = (
        "--device",
        "fake",
        "--threads",
        "2",
        "--api-keys",
        "k",
        "--host",
        "0.0.0.0",
        "--block-size",
        "32",
        "--drain-s",
        "7",
    )
    up = load(*options, "--nats-url", "nats://n:1", kind=UpSettings)
    assert isinstance(up, UpSettings)
    service = load(kind=kind, environment=as_environment(up, kind))
    assert service.model_dump() == {name: getattr(up, name) for name in kind.model_fields}


def test_a_model_folder_of_the_repository_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load("--model", "docs").model == ROOT / "docs"  # type: ignore[attr-defined]
    assert load("--model", "nowhere").model == Path("nowhere")  # type: ignore[attr-defined]
    (tmp_path / "docs").mkdir()
    assert load("--model", "docs").model == Path("docs")  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", [name for name, command in COMMANDS.items() if command.settings])
def test_each_command_takes_the_names_of_every_other(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One environment may serve them all: a name of another command's is no mistake."""
    kind = settings_of(command)
    assert kind is not None
    everything = {f"BATON_{name.upper()}": "" for name in known_names() - set(kind.model_fields)}

    assert load_settings(kind, command=command, arguments=[], environment=everything)
    assert "unknown" not in capsys.readouterr().err


def test_settings_of_all_commands_load_without_torch_or_http() -> None:
    check = "import sys; from services.runtime.commands import known_names; known_names(); "
    check += "sys.exit(bool({'torch', 'fastapi', 'uvicorn', 'tokenizers'} & set(sys.modules)))"

    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=False).returncode == 0


def test_service_levels_mean_the_same_to_gateway_and_planner() -> None:
    for name in ServiceLevelOptions.model_fields:
        assert all(name not in kind.__annotations__ for kind in (GatewaySettings, PlannerOptions, UpSettings))


def test_a_worker_leaves_sizes_to_its_device() -> None:
    on_cpu, on_gpu = (WorkerServiceSettings(device=device, max_sequences=7).sized() for device in ("cpu", "cuda"))

    assert (on_cpu.max_batch_tokens, on_cpu.step_timeout_s) == (512, 120.0)
    assert (on_gpu.max_batch_tokens, on_gpu.step_timeout_s) == (8192, 60.0)
    assert on_cpu.max_sequences == on_gpu.max_sequences == 7


def test_an_engine_is_told_what_the_worker_was() -> None:
    settings = WorkerServiceSettings(kv_memory_mb=3, block_size=32, max_model_len=99, threads=2, dtype="bfloat16")

    engine = settings.sized().engine()

    assert (engine.cache.kv_memory_bytes, engine.cache.block_size, engine.max_model_len) == (3 << 20, 32, 99)
    assert (engine.num_threads, engine.dtype, engine.max_batch_tokens) == (2, "bfloat16", 512)
    assert WorkerServiceSettings().sized().engine().cache.kv_memory_bytes is None


def test_a_gateway_counts_in_bytes_and_seconds() -> None:
    settings = GatewaySettings(ttft_slo_ms=250, batch_store_mb=2, keep_days=2, max_requests=4096)

    assert settings.levels().ttft_s == 0.25
    assert settings.batches().store_bytes == 2 << 20
    assert settings.batches().keep_s == settings.responses().keep_s == 2 * 86_400
    assert (settings.batches().concurrency, GatewaySettings(max_requests=1).batches().concurrency) == (64, 1)


@pytest.mark.parametrize(("device", "transport"), [("cpu", "shm"), ("cuda:1", "cuda_ipc")])
def test_the_automatic_transport_is_the_devices(device: str, transport: str) -> None:
    assert WorkerServiceSettings(device=device).kv_transport == transport
    ucx = WorkerServiceSettings(device=device, transport="ucx:fd00::7")
    assert (ucx.kv_transport, ucx.transport_host) == ("ucx", "fd00::7")
    assert WorkerServiceSettings(device=device, transport="ucx").transport_host == "127.0.0.1"
    quiet = WorkerServiceSettings(device=device, transport="ucx:fd00::7,no-pull")
    assert (quiet.kv_transport, quiet.transport_host, quiet.pulls, ucx.pulls) == ("ucx", "fd00::7", False, True)
    assert WorkerServiceSettings(device=device, transport="auto,no-pull").kv_transport == transport
    with pytest.raises(ConfigError, match="cuda_ipc, ucx, local or ucx:HOST, which ,no-pull may follow, is needed"):
        load("--transport", "shm:10.0.0.7")


def test_a_gguf_file_is_found_by_its_folder_its_kind_and_its_parts(tmp_path: Path) -> None:
    def model(name: str) -> tuple[Path, str]:
        settings = load("--model", name)
        return settings.model, settings.served_name  # type: ignore[attr-defined]

    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("q-Q4_K_M.gguf", "mmproj-q.gguf", "q-Imatrix.gguf", "config.json"):
        (folder / name).touch()
    assert model(str(folder)) == (folder / "q-Q4_K_M.gguf", "q-Q4_K_M")
    (folder / "model.safetensors").touch()
    assert model(str(folder)) == (folder, "models")
    assert model(f"{folder}:q4_k") == (folder / "q-Q4_K_M.gguf", "q-Q4_K_M")
    (folder / "model.safetensors").unlink()
    for part in (1, 2):
        (folder / f"q-Q8_0-0000{part}-of-00002.gguf").touch()
    first = folder / "q-Q8_0-00001-of-00002.gguf"
    assert model(str(folder / "q-Q8_0-00002-of-00002.gguf")) == (first, "q-Q8_0")
    assert model(f"{folder}:q8_0") == (first, "q-Q8_0")
    with pytest.raises(ConfigError, match=r"--model .*models holds several \(q-Q4_K_M.gguf, .*name one of"):
        model(str(folder))
    with pytest.raises(ConfigError, match=r"holds no Q5_K \(q-Q4_K_M\.gguf"):
        model(f"{folder}:Q5_K")
    assert model(f"{tmp_path}/none:Q5_K")[0] == Path(f"{tmp_path}/none:Q5_K")
    assert "there is no such file" in no_model(folder / "none.gguf")


def test_a_gguf_file_in_the_hubs_cache_is_found_by_id_and_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--q-GGUF"
    snapshot, blob = folder / "snapshots" / "c0ffee", folder / "blobs" / "0123"
    for each in (snapshot, blob.parent, folder / "refs"):
        each.mkdir(parents=True)
    (folder / "refs" / "main").write_text("c0ffee")
    blob.touch()
    for name in ("q-Q4_K_M.gguf", "q-Q8_0.gguf"):
        (snapshot / name).symlink_to(blob)
    found = load("--model", "org/q-GGUF:Q8_0")
    assert (found.model, found.served_name) == (snapshot / "q-Q8_0.gguf", "q-Q8_0")  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="holds several"):
        load("--model", "org/q-GGUF")
    below = snapshot / "UD-Q2_K_XL"  # large models' files have folders of their own
    below.mkdir()
    for part in (1, 2):
        (below / f"q-UD-Q2_K_XL-0000{part}-of-00002.gguf").symlink_to(blob)
    for name in ("q-Q4_K_M.gguf", "q-Q8_0.gguf"):
        (snapshot / name).unlink()
    found = load("--model", "org/q-GGUF")
    assert found.model == below / "q-UD-Q2_K_XL-00001-of-00002.gguf"  # type: ignore[attr-defined]


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_a_model_in_the_hubs_cache_is_found_by_its_id(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    below = {"HF_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}[variable]
    folder = tmp_path / below / "models--Qwen--Qwen3-0.6B"
    for commit in ("c0ffee", "beef"):
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "config.json").write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("c0ffee")
    latest = load("Qwen/Qwen3-0.6B", kind=UpSettings, command="up")
    assert isinstance(latest, UpSettings)
    assert (latest.model, latest.served_name) == (folder / "snapshots" / "c0ffee", "Qwen/Qwen3-0.6B")
    worker = load(environment=as_environment(latest, WorkerOptions))
    assert (worker.model, worker.served_name) == (latest.model, latest.served_name)  # type: ignore[attr-defined]
    pinned = load("--model", "Qwen/Qwen3-0.6B@beef", "--served-model-name", "q", kind=UpSettings)
    assert (pinned.model, pinned.served_name) == (folder / "snapshots" / "beef", "q")  # type: ignore[attr-defined]
    assert "baton pull Qwen/Qwen4" in no_model(load("--model", "Qwen/Qwen4").model)  # type: ignore[attr-defined]


def test_a_gateway_serves_one_model_or_those_that_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the demo model is found from anywhere
    one = load("--model", str(tmp_path), "--served-model-name", "demo", kind=GatewaySettings)
    assert isinstance(one, GatewaySettings)
    assert one.folders == {"demo": tmp_path}
    several = load("--served-models", f"demo=demo, other={tmp_path}", kind=GatewaySettings)
    assert isinstance(several, GatewaySettings)
    assert several.folders == {"demo": ROOT / "demo", "other": tmp_path}


@pytest.mark.parametrize(
    ("models", "told"),
    [
        ("demo", "'demo' is not name=folder"),
        ("=demo", "'=demo' is not name=folder"),
        ("demo=", "'demo=' is not name=folder"),
        ("a=x,b=y,a=z", "two models are called 'a'"),
    ],
)
def test_models_without_a_name_or_with_the_same_one_are_refused(models: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load("--served-models", models, kind=GatewaySettings)


def test_the_readme_asks_for_the_model_that_is_served_by_default() -> None:
    asked = re.findall(r'"model": "([^"]+)"', (ROOT / "README.md").read_text(encoding="utf-8"))
    assert asked
    assert set(asked) == {load(kind=GatewaySettings).served_name}
