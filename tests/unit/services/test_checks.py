"""Checks of `baton up` and `baton doctor` before anything starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from common.settings import ConfigError
from services.runtime.checks.finding import Finding, refuse
from services.runtime.checks.gpus import Gpu, Torch, check_gpus, read_build, torch_build, visible_gpus
from services.runtime.checks.memory import available_bytes, bytes_in_memory, check_memory, has_bfloat16
from services.runtime.checks.model import check_context, check_model, longest
from services.runtime.checks.weights import Weights, weights_of
from services.runtime.commands import COMMANDS, settings_of
from services.runtime.loading import load_settings
from services.runtime.running import Running
from services.up.checks import already_runs, before_the_model, examine
from services.up.settings import UpSettings, devices_of
from tests.gguf_files import changed, write_gguf
from tests.models import build_tiny_model

CPU, CUDA = Torch("2.13.0+cpu", ""), Torch("2.13.0", "13.0")
CARD = Gpu("NVIDIA H100", 80 << 30)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build_tiny_model(tmp_path / "tiny", "llama")


def failures(model: Path, **options: str) -> list[str]:
    return [finding.said for finding in check_model(model, **options) if finding.level == "fail"]


def test_a_whole_model_has_no_failure_and_is_described(model: Path) -> None:
    assert failures(model) == []
    said = [finding.text for finding in check_model(model)]
    assert said[0] == "LlamaForCausalLM is served"
    assert said[-1].endswith("in 1 file, complete")


def written(file: str, text: str) -> Callable[[Path], None]:
    return lambda model: (model / file).write_text(text) and None


def gone(file: str) -> Callable[[Path], None]:
    return lambda model: (model / file).unlink()


def shortened(model: Path) -> None:
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:-1])


def pickled(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            written("config.json", '{\n  "a": 1,\n  b: 2}'),
            "config.json is not JSON: line 3, column 3: expecting property name",
        ),
        (written("config.json", "[]"), "config.json is no JSON object"),
        (written("config.json", '{"architectures": "Llama"}'), "architectures must be a list of names"),
        (
            written("config.json", '{"architectures": ["FooForCausalLM"]}'),
            "FooForCausalLM is not served (docs/models.md)",
        ),
        (gone("config.json"), "no config.json there; give a Hugging Face model folder, or a GGUF file"),
        (gone("tokenizer.json"), "no tokenizer.json in "),
        (written("tokenizer.json", "{"), "tokenizer.json is not JSON: line 1"),
        (written("generation_config.json", "{,}"), "generation_config.json is not JSON: line 1, column 2"),
        (shortened, "model.safetensors has "),
        (pickled, "holds pickled weights only, which can run code when loaded; download the safetensors files"),
        (gone("model.safetensors"), "no .safetensors in "),
        (written("model.safetensors.index.json", '{"weight_map": {"a": "b.safetensors"}}'), "b.safetensors is missing"),
    ],
)
def test_what_is_wrong_with_a_folder_is_said_with_its_file(
    model: Path, spoil: Callable[[Path], None], says: str
) -> None:
    spoil(model)
    [said] = failures(model)
    assert says in said
    assert "; " in said or "not served" in said, "no remedy"


def test_a_class_that_only_transformers_knows_is_told_from_one_that_nobody_does(model: Path) -> None:
    (model / "config.json").write_text('{"architectures": ["BloomForCausalLM"], "model_type": "bloom"}')
    assert failures(model) == []
    [said] = failures(model, impl="baton")
    assert said.startswith(f"{model / 'config.json'}: BloomForCausalLM is not served")


def test_gguf_files_are_checked_likewise(model: Path, tmp_path: Path) -> None:
    file = write_gguf(model, tmp_path / "model.gguf")
    assert failures(file) == []
    assert longest(file) == longest(model) == 1024
    other = changed(file, tmp_path / "other.gguf", general__architecture="mamba2")
    assert failures(other)[0] == f"{other}: mamba2 is not served (docs/models.md); nearest: jamba"
    file.write_bytes(file.read_bytes()[:-100])
    assert "is the download complete?" in failures(file)[0]
    assert "there is no such file" in failures(tmp_path / "none.gguf")[0]


def test_a_context_that_is_too_long_is_told_with_the_longest(model: Path) -> None:
    assert list(check_context(model, 0)) == list(check_context(model, 1024)) == []
    [found] = check_context(model, 100_000)
    assert found.said.startswith("--max-model-len 100000: the model has 1024 positions")
    assert "use --max-model-len 1024 or less" in found.remedy


@pytest.mark.parametrize(
    ("asked", "workers", "build", "gpus", "says"),
    [
        (
            "cuda",
            2,
            CPU,
            [],
            "--device cuda: torch 2.13.0+cpu sees no GPU; install a CUDA build of torch, and a driver",
        ),
        ("cuda", 1, CUDA, [], "--device cuda: torch 2.13.0 sees no GPU; install a driver; see `nvidia-smi`"),
        ("cuda", 1, CUDA, None, "--device cuda: the driver gives no answer; see `nvidia-smi` and dmesg"),
        ("cuda", 2, CUDA, [CARD], "--device cuda: 2 GPUs are needed, 1 is there; --prefill 0 --decode 1 needs one"),
        ("cuda:3", 1, CUDA, [CARD, CARD], "--device cuda:3: 4 GPUs are needed, 2 are there"),
        ("cuda", 2, CUDA, [CARD, CARD], ""),
        ("cuda:1", 3, CUDA, [CARD, CARD], ""),
        ("cuda", 1, None, None, ""),
    ],
)
def test_devices(asked: str, workers: int, build: Torch | None, gpus: list[Gpu] | None, says: str) -> None:
    found = check_gpus(asked, devices_of(asked, [1] * workers), build, gpus)
    assert found.level == ("fail" if says else "ok")
    assert found.said.startswith(says)


def test_the_build_of_torch_is_read_without_importing_it() -> None:
    import torch

    assert torch_build() == Torch(torch.__version__, torch.version.cuda or "")
    source = "debug = False\n__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    assert read_build(source) == Torch("2.13.0+cu130", "13.0")
    assert read_build("") is None


def test_the_driver_is_asked_in_a_child() -> None:
    import torch

    found = visible_gpus()
    assert found is not None
    assert len(found) == torch.cuda.device_count()


@pytest.mark.parametrize(
    ("elements", "options", "needed"),
    [
        ({"BF16": 1000}, {"on_cpu": True, "has_bfloat16": False}, 4000),
        ({"BF16": 1000}, {"on_cpu": True, "has_bfloat16": True}, 2000),
        ({"F16": 1000}, {"on_cpu": True, "has_bfloat16": True}, 4000),
        ({"BF16": 1000}, {"on_cpu": False}, 2000),
        ({"BF16": 1000}, {"on_cpu": False, "quantization": "int4"}, 500),
        ({"BF16": 1000, "I32": 100}, {"on_cpu": False}, 2400),
        ({"Q4_0": 3200}, {"on_cpu": False}, 1800),
        ({"Q4_0": 3200}, {"on_cpu": True, "has_bfloat16": False}, 12800),
        ({"Q4_0": 3200}, {"on_cpu": True, "quantization": "int8"}, 3200),
        ({"MXFP4": 3200}, {"on_cpu": True}, 1700),
    ],
)
def test_what_weights_take_in_memory(elements: dict[str, int], options: dict[str, object], needed: int) -> None:
    asked = {"dtype": "auto", "quantization": "auto", "has_bfloat16": False} | options
    assert bytes_in_memory(Weights(1, 10**6, elements), **asked) == needed  # type: ignore[arg-type]


def test_what_does_not_fit_is_a_warning_with_both_figures() -> None:
    found = check_memory(16_400_000_000, 7_500_000_000, "memory that is free")
    assert found.level == "warn"
    assert "about 16.4 GB" in found.said
    assert "7.5 GB of memory that is free" in found.said
    assert check_memory(1, None, "memory").level == check_memory(1, 2, "memory").level == "ok"


def test_memory_is_bounded_by_a_container(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:       24682416 kB\nMemAvailable:   1000 kB\n")
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx512_bf16 sse\n")
    assert available_bytes(tmp_path) == 1000 * 1024
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert available_bytes(tmp_path) == 1000 * 1024
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("4096\n")
    assert available_bytes(tmp_path) == 4096
    assert has_bfloat16(tmp_path)


def test_sizes_are_those_of_the_headers(model: Path, tmp_path: Path) -> None:
    whole = weights_of(model)
    parts = weights_of(build_tiny_model(tmp_path / "parts", "llama", shards=3))
    assert (parts.num_files, parts.elements) == (3, whole.elements)
    assert whole.num_parameters * 4 < whole.num_bytes < whole.num_parameters * 4 + 20_000
    assert Weights(1, 9, {"I32": 1, "BF16": 1}).num_parameters == 0


def asked(model: Path, data: Path, *options: str) -> UpSettings:
    arguments = ["--model", str(model), "--data-dir", str(data), "--port", "0", *options]
    return load_settings(UpSettings, command="up", arguments=arguments, environment={}).shared_out()


def test_up_looks_at_everything_and_refuses_with_a_line_each(model: Path, tmp_path: Path) -> None:
    assert [finding.level for finding in examine(asked(model, tmp_path))] == ["ok"] * 4
    (model / "tokenizer.json").unlink()
    shortened(model)
    with pytest.raises(ConfigError) as refused:
        refuse(examine(asked(model, tmp_path, "--device", "cuda")))
    said = str(refused.value).split("\nbaton: ")
    assert len(said) == 3
    assert all(
        part in line for part, line in zip(("sees no GPU", "tokenizer.json", "model.safetensors"), said, strict=True)
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tool-call-parser", "hermse"], "--tool-call-parser: 'hermse' is no parser, did you mean 'hermes'?"),
        (["--tool-call-parser", "phi4mini"], "did you mean 'phi4_mini'?"),
        (["--reasoning-parser", "chat=think"], "--reasoning-parser: no model 'chat' is served; served: tiny"),
    ],
)
def test_a_parser_s_unknown_name_is_refused_with_the_nearest_one(
    model: Path, tmp_path: Path, options: list[str], says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        asked(model, tmp_path, *options)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("absent.jinja", "--chat-template absent.jinja: no such file"),
        ("{{ message", "--chat-template: is no Jinja: line 1"),
        ("{{ prompt }}", "--chat-template: is no chat template: it reads no `messages`"),
    ],
)
def test_what_is_no_chat_template_is_refused_before_anything_starts(
    model: Path, tmp_path: Path, given: str, says: str
) -> None:
    failed = [
        finding.said for finding in examine(asked(model, tmp_path, "--chat-template", given)) if finding.level == "fail"
    ]
    assert [says in line for line in failed] == [True]


def test_a_chat_template_is_a_file_or_jinja_itself_for_all_models_or_one(model: Path, tmp_path: Path) -> None:
    jinja = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (file := tmp_path / "chat.jinja").write_text(jinja)
    models = ["--served-models", f"a={model},b={model}"]
    for given, told in (
        (str(file), (jinja, jinja)),
        (jinja, (jinja, jinja)),
        (f"b={file}", ("", jinja)),
        ("", ("", "")),
    ):
        settings = asked(model, tmp_path, *models, "--chat-template", given)
        assert (settings.template("a"), settings.template("b")) == told
        assert all(finding.level != "fail" for finding in examine(settings))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--keep-alive", "5m,1h", "--device", "cuda"], "--keep-alive 5m,1h: models are unloaded and don't sleep: "),
        (["--keep-alive", "5m,1h", "--device", "cuda"], "--transport cuda_ipc: peers know a GPU's KV cache by its"),
        (["--keep-alive", "5m,1h", "--device", "cuda", "--transport", "local", "--prefill", "0"], ""),
        (["--keep-alive", "5m", "--device", "cuda"], ""),
        (["--keep-alive", "5m,1h", "--transport", "ucx"], ""),
    ],
)
def test_models_that_can_not_sleep_as_asked_are_told_with_the_flag(
    model: Path, tmp_path: Path, options: list[str], says: str
) -> None:
    told = [finding.said for finding in before_the_model(asked(model, tmp_path, *options)) if finding.level == "warn"]
    assert bool(told) is bool(says)
    assert all(says in line for line in told)


def test_port_0_is_a_free_one(model: Path, tmp_path: Path) -> None:
    one, several = asked(model, tmp_path), asked(model, tmp_path, "--gateways", "2")
    assert one.port
    assert several.own_ports == (several.port + 1, several.port + 2)


def test_a_second_one_in_the_same_folder_is_told_of_the_first() -> None:
    began = time.mktime((2026, 11, 24, 12, 15, 0, 0, 0, -1))
    running = Running(url="http://127.0.0.1:8000", pid=1, started_unix=began)
    said = already_runs(running, Path(".baton"), now=began + 60).said
    assert said.startswith("Baton runs here since 12:15: http://127.0.0.1:8000")
    assert "chat` talks to it" in said
    assert "--port" in said
    assert "since 24 November, 12:15" in already_runs(running, Path(".baton"), now=began + 100_000).said


def test_a_wrong_form_is_told_in_words() -> None:
    with pytest.raises(ConfigError, match="cpu, cuda, GPUs by number, as cuda:0,cuda:1, or fake is needed, not 'tpu'"):
        load_settings(UpSettings, command="up", arguments=["--device", "tpu"], environment={})


@pytest.mark.parametrize("command", [name for name, command in COMMANDS.items() if command.settings])
def test_every_pattern_of_a_setting_has_its_words(command: str) -> None:
    kind = settings_of(command)
    assert kind is not None
    for name, field in kind.model_fields.items():
        names = {type(each).__name__ for each in field.metadata}
        if any(getattr(each, "pattern", None) for each in field.metadata):
            assert "Form" in names, f"{name} has a pattern without words"


def test_findings_are_one_line_each() -> None:
    assert Finding("gpu", "fail", "none", "buy one").line() == "FAIL  gpu       none; buy one"
    refuse([Finding("gpu", "warn", "slow"), Finding("gpu", "ok", "fine")])
