"""Models by URL from stand-ins of S3, a container registry and ModelScope: fetched, resumed, checked, listed, removed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.settings import ROOT, ConfigError
from services.runtime import hub as names
from services.runtime.hub import MAIN, Named, parsed
from services.runtime.loading import load_settings
from services.runtime.models import fetching
from services.runtime.models.kept import kept_models, named_one, removed
from services.runtime.models.named import brought, by_name
from services.up.settings import UpSettings
from tests.needs import needs
from tests.stores import Store, stores_served

FILES = {
    name: (ROOT / "demo" / name).read_bytes() for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
}
WEIGHTS = (ROOT / "demo" / "model.safetensors").read_bytes()
STORES = ("s3", "oci", "modelscope")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with stores_served() as store:
        store.files = FILES | {"model.safetensors": WEIGHTS}
        settings = {
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "MODELSCOPE_DOMAIN": store.host,
            "AWS_ENDPOINT_URL": store.url,
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "DOCKER_CONFIG": str(tmp_path / "docker"),
        }
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(fetching, "FIRST_PAUSE_S", 0.0)
        monkeypatch.chdir(tmp_path)
        yield store


def url_of(store: Store, scheme: str) -> str:
    if scheme == "s3":
        needs("s3fs")
    found = {
        "s3": "s3://bucket/models/demo",
        "oci": f"oci://{store.host}/team/demo:v1",
        "modelscope": "modelscope://org/demo",
    }
    return found[scheme]


def fetch(name: str) -> Path:
    return by_name(name, lambda line: None)


@pytest.mark.parametrize("scheme", STORES)
def test_a_model_is_fetched_found_again_listed_and_removed(store: Store, scheme: str) -> None:
    url = url_of(store, scheme)
    folder = fetch(url)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == store.files
    asked = len(store.requests)
    assert brought(Path(url), lambda line: None) == folder
    settings = load_settings(UpSettings, command="up", arguments=["--model", url], environment={})
    assert settings.model == folder
    assert len(store.requests) == asked
    (one,) = kept_models()
    assert (one.name, one.is_whole, one.num_bytes) == (url, True, sum(map(len, store.files.values())))
    assert removed(named_one(url)) == one.num_bytes
    assert kept_models() == []
    assert not folder.exists()


@pytest.mark.parametrize("scheme", STORES)
def test_what_a_gateway_fetched_is_completed_for_a_worker(store: Store, scheme: str) -> None:
    url = url_of(store, scheme)
    folder = brought(Path(url), lambda line: None, text_alone=True)
    assert not (folder / "model.safetensors").exists()
    settings = load_settings(UpSettings, command="up", arguments=["--model", url], environment={})
    assert settings.model == folder
    assert brought(settings.model, lambda line: None) == folder
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_a_token_that_ends_while_files_come_is_renewed(store: Store) -> None:
    store.tokens_last = 3  # one for the manifest, two for files
    assert {file.name for file in fetch(url_of(store, "oci")).iterdir()} == set(store.files)
    assert sum(path.startswith("/token") for _, path, _ in store.requests) > 1


@pytest.mark.parametrize("scheme", STORES)
def test_what_broke_off_goes_on_where_it_ended(store: Store, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = url_of(store, scheme)
    store.cut.add("model.safetensors")
    assert (fetch(url) / "model.safetensors").read_bytes() == WEIGHTS
    if scheme != "s3":  # its client asks for pieces of 8 MiB, and again by itself
        part = "blobs" if scheme == "oci" else "FilePath=model.safetensors"
        assert any(int(one.removeprefix("bytes=").removesuffix("-")) > 0 for one in store.ranges(part) if one)


@pytest.mark.parametrize("scheme", STORES)
def test_a_file_whose_hash_differs_is_not_kept(store: Store, scheme: str) -> None:
    url = url_of(store, scheme)
    store.wrong.add("model.safetensors")
    with pytest.raises(ConfigError, match="its hash differs"):
        fetch(url)
    assert names.whole(parsed(url) or Named("")) is None
    store.wrong.clear()
    assert (fetch(url) / "model.safetensors").read_bytes() == WEIGHTS


def test_an_object_of_several_parts_has_no_hash_and_a_new_one_is_another_snapshot(store: Store) -> None:
    url = url_of(store, "s3")
    store.multipart.add("model.safetensors")
    first = fetch(url)
    store.files["model.safetensors"] = WEIGHTS[:-1] + b"x"
    second = by_name(url, lambda line: None, newest=True)
    assert first != second
    assert (second / "model.safetensors").read_bytes()[-1:] == b"x"
    assert (first / "model.safetensors").read_bytes() == WEIGHTS


def test_an_index_of_one_manifest_leads_to_it(store: Store) -> None:
    store.index = True
    assert (fetch(url_of(store, "oci")) / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("modelscope://org/none", "no such model, or no such revision"),
        ("modelscope://org/demo@gone", "no such model, or no such revision"),
        ("oci://HOST/team/none:v1", "no such model, or no such revision"),
        ("oci://HOST/team/demo:gone", "no such model, or no such revision"),
        ("s3://bucket/nothing", "nothing below it"),
    ],
)
def test_what_is_not_there_is_told_by_name(store: Store, url: str, told: str) -> None:
    if url.startswith("s3"):
        needs("s3fs")
    with pytest.raises(ConfigError, match=told):
        fetch(url.replace("HOST", store.host))


def test_a_missing_package_is_named_with_its_command() -> None:
    code = "import sys; sys.modules['s3fs'] = None\nfrom services.runtime.models.named import by_name\nby_name('s3://a/b', print)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert "s3:// needs the package s3fs: `pip install s3fs`" in done.stderr


def test_urls_are_read_and_written() -> None:
    digest = "sha256:" + "ab" * 32
    cases = {
        "s3://bucket/a/b-c:Q4_K_M": Named("s3://bucket/a/b-c", MAIN, "Q4_K_M"),
        "gs://bucket": Named("gs://bucket"),
        "oci://ghcr.io/a/b:v1": Named("oci://ghcr.io/a/b", "v1"),
        f"oci://localhost:5000/a@{digest}": Named("oci://localhost:5000/a", digest),
        "modelscope://org/name@v2:Q8_0": Named("modelscope://org/name", "v2", "Q8_0"),
    }
    for text, named in cases.items():
        assert parsed(text) == named
        assert str(named) == text
        assert parsed(str(Path(text))) == named  # a path has one slash less
    for text in (
        "s3://",
        "oci://host",
        "oci://user:pw@host/a",
        "modelscope://name",
        "ftp://a/b",
        "s3://a/../b",
        "s3://a/.b",
    ):
        assert parsed(text) is None
    assert names.folder_of("s3://a/b-c") != names.folder_of("s3://a/b/c")
