"""The torch that `make setup` installs, and its lines before the download: against pip itself, with packages made here."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cli import torch_build
from cli.torch_build import Offer, ask, cpu_index, has_gpu, is_configured, offer_of, size_of, told, urls_of

FOR_GPUS = Offer("2.13.0", "cuda", "https://example.org")
FOR_CPUS = Offer("2.13.0+cpu", "cpu", "https://example.org")


def package(folder: Path, name: str, version: str, *needs: str) -> Path:
    """Write a wheel with nothing in it, as an index has it."""
    folder = folder / name.replace("_", "-")
    folder.mkdir(parents=True, exist_ok=True)
    file, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", "Project-URL: Homepage, https://example.org"]
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join((*lines, *(f"Requires-Dist: {each}" for each in needs), "")))
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    listed = "".join(f'<a href="{each.name}">{each.name}</a>' for each in folder.glob("*.whl"))
    (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{listed}</body></html>")
    return file


@pytest.fixture
def public(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A public index, whose torch is for GPUs; pip has no settings but that."""
    for name in torch_build.INDEXES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {(tmp_path / 'public').as_uri()}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    package(tmp_path / "public", "nvidia_blas", "1.0")
    package(
        tmp_path / "public",
        "torch",
        "2.13.0",
        'nvidia-blas; sys_platform != "none"',
        'nvidia-other; sys_platform == "none"',
    )
    return tmp_path / "public"


def test_pip_says_which_build_it_would_take(public: Path, tmp_path: Path) -> None:
    assert ask("torch==2.13.0", {}) == FOR_GPUS
    urls = urls_of("torch==2.13.0", {})
    assert len(urls) == 2
    assert size_of(urls) == sum(file.stat().st_size for file in public.rglob("*.whl"))
    package(tmp_path / "own", "torch", "2.13.0+cpu")
    there = torch_build.with_index({}, (tmp_path / "own").as_uri())
    assert ask("torch==2.13.0", there) == FOR_CPUS
    assert ask("torch==2.99.0", {}) is None
    assert size_of([(tmp_path / "none.whl").as_uri()]) == 0


@pytest.mark.quick(first=1)
@pytest.mark.parametrize(
    ("gpu", "configured", "asked", "taken", "says"),
    [
        (False, False, "", "+cpu", "installing torch 2.13.0+cpu for CPUs (once) …"),
        (
            False,
            True,
            "",
            "",
            "there is no GPU here, and this build brings CUDA: Ctrl-C, then `make up TORCH_INDEX=ADDRESS`",
        ),
        (True, False, "", "", "installing torch 2.13.0 for GPUs (once) …"),
    ],
)
def test_without_a_gpu_the_build_for_cpus_is_taken_where_nobody_said_otherwise(
    public: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    gpu: bool,
    configured: bool,
    asked: str,
    taken: str,
    says: str,
) -> None:
    package(tmp_path / "own", "torch", "2.13.0+cpu")
    monkeypatch.setattr(torch_build, "cpu_index", lambda site: (tmp_path / "own").as_uri())
    monkeypatch.setattr(torch_build, "has_gpu", lambda: gpu)
    monkeypatch.setattr(torch_build, "is_configured", lambda: configured)
    monkeypatch.setattr(torch_build, "is_there", lambda wanted: False)
    monkeypatch.setattr(torch_build, "urls_of", lambda wanted, settings: [])  # one start of pip less: above
    monkeypatch.setenv("TORCH", asked)
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "installed"))
    monkeypatch.setattr(sys, "argv", ["torch_build", "torch==2.13.0"])
    assert torch_build.main() == 0
    [info] = (tmp_path / "installed").glob("torch-*.dist-info")
    assert info.name == f"torch-2.13.0{taken}.dist-info"
    assert says in capfd.readouterr().out


def test_an_index_that_is_named_is_used_and_a_wrong_word_is_refused(
    public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path / "own", "torch", "2.13.0+cpu")
    monkeypatch.setenv("TORCH_INDEX", (tmp_path / "own").as_uri())
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "installed"))
    monkeypatch.setattr(torch_build, "is_there", lambda wanted: False)
    monkeypatch.setattr(torch_build, "urls_of", lambda wanted, settings: [])  # one start of pip less: above
    monkeypatch.setattr(sys, "argv", ["torch_build", "torch==2.13.0"])
    assert torch_build.main() == 0
    assert [*(tmp_path / "installed").glob("torch-2.13.0+cpu.dist-info")]
    monkeypatch.setenv("TORCH", "rocm")
    assert torch_build.main() == 2


def test_pips_own_settings_are_seen(public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_configured()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    assert not is_configured()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert is_configured()


def test_what_is_told() -> None:
    assert told(None, "cpu", 0) == ["installing torch (once) …"]
    assert told(FOR_GPUS, "cuda", 2_740_713_029) == ["installing torch 2.13.0 for GPUs (once, 2.7 GB) …"]
    assert "which uses no GPU" in told(FOR_CPUS, "cuda", 0)[1]
    assert cpu_index("https://example.org/").startswith("https://download.example.org/")
    of_a_mac = {"version": "2.13.0", "requires_dist": ['nvidia-blas==1; platform_system == "Nowhere"', "sympy"]}
    assert offer_of(of_a_mac) == Offer("2.13.0", "cpu", "")


def test_a_gpu_is_seen_by_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not has_gpu(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert has_gpu(tmp_path)


def test_it_needs_nothing_but_the_standard_library() -> None:
    code = "import cli.torch_build, sys; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-S", "-c", code], check=False).returncode == 0
