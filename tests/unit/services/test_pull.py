"""`baton pull` of a model that is here already, that has no such file, or that nothing serves: its words."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from cli.pull.__main__ import main
from common.settings import ROOT, ConfigError
from modelfiles.files import found
from modelfiles.gguf import GgufError
from services.runtime.models.named import by_name
from tests.hub import Hub

DEMO = {
    name: (ROOT / "demo" / name).read_bytes()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
}
WEIGHTS = {"model.safetensors": (ROOT / "demo" / "model.safetensors").read_bytes()}


def newest(name: str) -> None:
    by_name(name, lambda line: None, newest=True)


def test_what_is_here_is_not_said_to_be_missing(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/demo", DEMO | WEIGHTS)
    newest("org/demo")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="org/demo: here already, and HF_HUB_OFFLINE is set: unset it to ask"):
        newest("org/demo")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"org/demo: here already, perhaps not the newest, and .* can't be reached"):
        newest("org/demo")


def test_a_quantisation_of_a_model_without_gguf_files_is_refused_with_a_remedy(hub: Hub) -> None:
    hub.add("org/demo", DEMO | WEIGHTS)
    with pytest.raises(ConfigError, match=r"org/demo:Q4_K_M: it has no GGUF file, .*: leave :Q4_K_M out$"):
        newest("org/demo:Q4_K_M")


def test_pull_says_that_nothing_serves_a_model(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("org/demo", DEMO | WEIGHTS)
    hub.add("org/foo", DEMO | WEIGHTS | {"config.json": b'{"architectures": ["FooForCausalLM"]}'})
    monkeypatch.setattr("cli.pull.__main__.fit_here", lambda model: [])
    for words, code in ((["org/demo"], 0), (["org/foo", "org/demo"], 1)):
        monkeypatch.setattr("sys.argv", ["pull", *words])
        assert main() == code
        said = capsys.readouterr().out
        assert ("org/foo: " in said and "FooForCausalLM is not served" in said) == bool(code)
        assert "org/demo: " in said


def test_a_folder_without_gguf_files_has_no_quantisation_to_choose(tmp_path: Path) -> None:
    for name, content in (DEMO | WEIGHTS).items():
        (tmp_path / name).write_bytes(content)
    assert found(tmp_path) == tmp_path
    with pytest.raises(GgufError, match=rf"^{tmp_path} holds no GGUF file: leave :Q4_K_M out$"):
        found(tmp_path, "Q4_K_M")
