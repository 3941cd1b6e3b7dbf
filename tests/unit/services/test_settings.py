"""Settings: who wins, and what a person is told when one is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from common.config import (
    ROOT,
    ChatSettings,
    ConfigError,
    GatewaySettings,
    UpSettings,
    WorkerOptions,
    WorkerServiceSettings,
    as_environment,
    load_settings,
)


def load(
    *arguments: str, kind: type[BaseModel] = WorkerServiceSettings, environment: dict[str, str] | None = None
) -> BaseModel:
    return load_settings(kind, command="test", arguments=arguments, environment=environment or {})


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
    assert settings.max_prefills == WorkerServiceSettings.model_fields["max_prefills"].default


def test_the_file_may_be_named_by_a_variable_and_serve_several_services(file: Path) -> None:
    gateway = load(kind=GatewaySettings, environment={"BATON_CONFIG": str(file)})
    assert isinstance(gateway, GatewaySettings)
    assert gateway.port == 1234


def test_a_variable_that_is_true_can_be_denied_by_a_flag() -> None:
    on = load(environment={"BATON_FAKE": "true"})
    off = load("--no-fake", environment={"BATON_FAKE": "true"})
    assert (on.fake, off.fake) == (True, False)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "environment", "told"),
    [
        (["--max-sequence", "4"], {}, "unknown option --max-sequence (did you mean --max-sequences?)"),
        ([], {"BATON_MAX_SEQUENCE": "4"}, "unknown variable BATON_MAX_SEQUENCE (did you mean BATON_MAX_SEQUENCES?)"),
        (["--max-sequences", "none"], {}, "--max-sequences (BATON_MAX_SEQUENCES): input should be a valid integer"),
        ([], {"BATON_THREADS": "0"}, "--threads (BATON_THREADS): input should be greater than or equal to 1, not '0'"),
        (["--block-size", "17"], {}, "--block-size (BATON_BLOCK_SIZE): input should be 8, 16, 32, 64 or 128, not 17"),
        (
            ["--transport", "pigeon"],
            {},
            "--transport (BATON_TRANSPORT): input should be 'auto', 'shm', 'cuda_ipc', 'ucx' or 'local'",
        ),
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


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("treads = 2", "unknown setting 'treads' (did you mean threads?)"),
        ("threads = [2]", "--threads (BATON_THREADS): input should be a valid integer"),
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
        "--fake",
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
