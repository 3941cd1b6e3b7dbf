"""Models by name from a stand-in of the hub, by the hub's own client: fetched, resumed, checked, listed, removed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import huggingface_hub
import pytest
from huggingface_hub import constants

from cli.list.__main__ import main as list_main
from cli.rm.__main__ import main as rm_main
from cli.show import __main__ as show
from common.settings import ROOT, ConfigError
from services.runtime import hub as names
from services.runtime.hub import parsed
from services.runtime.loading import load_settings
from services.runtime.models import serving as locks
from services.runtime.models.kept import kept_models, named_one, removed
from services.runtime.models.named import brought, by_name
from services.runtime.models.serving import is_served
from services.up.settings import UpSettings
from tests.hub import Hub

DEMO = {
    name: (ROOT / "demo" / name).read_bytes()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
}
WEIGHTS = (ROOT / "demo" / "model.safetensors").read_bytes()
PICKLED = b"\x80\x04pickle"


def fetch(name: str) -> Path:
    return by_name(name, lambda line: None)


def run(hub: Hub, *words: str) -> subprocess.Popen[str]:
    """A command of its own, which finds the hub by variables alone."""
    variables = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "cli", *words]
    return subprocess.Popen(
        command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_name_has_a_repository_a_revision_and_a_kind() -> None:
    assert parsed("org/name") == ("org/name", "main", "")
    assert parsed("org/name@v1:Q4_K_M") == ("org/name", "v1", "Q4_K_M")
    assert parsed("org/name@refs/pr/3") == ("org/name", "refs/pr/3", "")
    assert parsed("org/name:sub/a-Q8_0.gguf") == ("org/name", "main", "sub/a-Q8_0.gguf")
    for text in ("name", "/org/name", "org/name/more", "org/../x", "org/name@", "org/name:", "a b/c", "../a/b"):
        assert parsed(text) is None
    assert str(parsed("org/name@v1:Q8_0")) == "org/name@v1:Q8_0"


def test_safetensors_and_text_come_once_and_nothing_else(hub: Hub) -> None:
    others = {"pytorch_model.bin": PICKLED, "modeling.py": b"import os", "README.md": b"#", "onnx/model.onnx": b"0"}
    commit = hub.add("org/demo", DEMO | others | {"model.safetensors": WEIGHTS})
    said: list[str] = []
    folder = by_name("org/demo", said.append)
    assert {str(file.relative_to(folder)) for file in folder.rglob("*")} == {*DEMO, "model.safetensors"}
    assert (folder.name, (folder / "model.safetensors").read_bytes()) == (commit, WEIGHTS)
    assert re.match(rf"fetching org/demo@{commit[:7]}: 5 files, \d+ MB, into ", said[0])
    shared = huggingface_hub.hf_hub_download(
        "org/demo", "model.safetensors", local_files_only=True, cache_dir=names.cache()
    )
    assert Path(shared).resolve() == (folder / "model.safetensors").resolve()
    before = len(hub.requests)
    assert fetch("org/demo") == folder == fetch(f"org/demo@{commit}") == fetch(f"org/demo@{commit[:9]}")
    settings = load_settings(UpSettings, command="up", arguments=["org/demo"], environment={})
    assert (settings.model, settings.served_name) == (folder, "org/demo")
    assert len(hub.requests) == before


def test_the_files_are_those_that_the_index_names(hub: Hub) -> None:
    shards = {f"model-0000{part}-of-00002.safetensors": bytes([part]) * 90 for part in (1, 2)}
    index = json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}).encode()
    whole = DEMO | shards | {"model.safetensors.index.json": index, "consolidated.safetensors": b"0" * 500}
    hub.add("org/shards", whole | {"pytorch_model.bin.index.json": b"{}"})
    folder = fetch("org/shards")
    there = {str(file.relative_to(folder)) for file in folder.rglob("*")}
    assert there == {*DEMO, *shards, "model.safetensors.index.json"}
    hub.add("org/lacks", {name: content for name, content in whole.items() if "00002-of" not in name})
    with pytest.raises(ConfigError, match=r"names model-00002-of-00002\.safetensors, which is not there"):
        fetch("org/lacks")


def test_a_gguf_file_is_chosen_by_its_quantisation_or_name(hub: Hub) -> None:
    ggufs = {f"q-{kind}.gguf": kind.encode() * 9 for kind in ("Q4_K_M", "Q4_K_S", "Q8_0")}
    parts = {f"BF16/q-BF16-0000{part}-of-00002.gguf": b"b" * 50 for part in (1, 2)}
    hub.add("org/q", ggufs | parts | {"mmproj-q-F16.gguf": b"m", "README.md": b""})
    assert fetch("org/q:Q8_0").read_bytes() == ggufs["q-Q8_0.gguf"]
    assert [file.name for file in fetch("org/q:q8_0").parent.iterdir()] == ["q-Q8_0.gguf"]
    assert fetch("org/q:q-Q4_K_S.gguf").name == "q-Q4_K_S.gguf"
    assert fetch("org/q:bf16").name == "q-BF16-00001-of-00002.gguf"
    assert [one.name for one in kept_models()] == ["org/q:BF16", "org/q:Q4_K_S", "org/q:Q8_0"]
    hub.add("org/ud", {f"m-{kind}.gguf": kind.encode() for kind in ("Q4_K_M", "UD-Q4_K_M", "i1-Q4_K_M_L")})
    assert fetch("org/ud:Q4_K_M").read_bytes() == b"Q4_K_M"
    assert fetch("org/ud:ud-q4_k_m").read_bytes() == b"UD-Q4_K_M"
    hub.add("org/old", {f"m_{kind}.gguf": kind.encode() for kind in ("Q4_0", "Q4_0_4_4")})
    assert fetch("org/old:Q4_0").read_bytes() == b"Q4_0"
    hub.add("org/part", {f"m.{kind}.gguf": kind.encode() for kind in ("IQ3_XS", "Q8_0")})
    assert fetch("org/part:iq3").read_bytes() == b"IQ3_XS"  # no whole word, and fits one file alone
    hub.add("org/one", {"q-Q8_0.gguf": b"x"})
    assert fetch("org/one").name == "q-Q8_0.gguf"
    hub.add("org/more", ggufs)
    with pytest.raises(ConfigError) as raised:
        fetch("org/more:Q4_K")
    assert "several are 'Q4_K'; name one of them, as org/more:Q4_K_M" in str(raised.value)
    with pytest.raises(ConfigError, match=r"it has no 'Q3_K'; name one(.|\n)*q-Q8_0.gguf  0 MB"):
        fetch("org/q:Q3_K")


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"pytorch_model.bin": PICKLED, "config.json": b"{}"}, "holds pickled weights only"),
        ({"model.safetensors": b"0"}, "it has no config.json"),
        ({"README.md": b""}, "neither safetensors nor GGUF"),
        ({"a-00001-of-00002.gguf": b"0"}, "1 of its 2 parts are there"),
    ],
)
def test_what_can_t_be_served_is_not_fetched(hub: Hub, files: dict[str, bytes], told: str) -> None:
    hub.add("org/other", files)
    with pytest.raises(ConfigError, match=told):
        fetch("org/other")
    assert hub.asked("GET", "/cdn/") == []


def test_the_token_goes_to_the_hub_and_never_to_the_cdn(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    hub.add("org/private", DEMO | {"model.safetensors": WEIGHTS}, is_private=True)
    with pytest.raises(ConfigError, match=r"no such model at http://127\.0\.0\.1:.*, or a private one") as raised:
        fetch("org/private")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(ConfigError, match="refuses the token: give HF_TOKEN") as refused:
        fetch("org/private")
    assert "hf_other" not in str(raised.value) + str(refused.value)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert fetch("org/private").is_dir()
    sent = [one for one in hub.asked("GET", "/cdn/") if one["path"].endswith("safetensors")]
    assert [one["Authorization"] for one in sent] == [""]


def test_consent_and_revisions_are_asked_for_by_name(hub: Hub) -> None:
    hub.add("org/gated", DEMO | {"model.safetensors": WEIGHTS}, is_gated=True)
    with pytest.raises(
        ConfigError, match=rf"its makers ask for consent: give it at {hub.url}/org/gated, then give HF_TOKEN"
    ):
        fetch("org/gated")
    with pytest.raises(ConfigError, match="has org/gated, but no revision v2"):
        fetch("org/gated@v2")
    with pytest.raises(ConfigError, match=r"--model org/nothing: no such folder here, and no such model at"):
        brought(Path("org/nothing"), lambda line: None)


def test_offline_it_says_so_in_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/demo", DEMO | {"model.safetensors": WEIGHTS})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="and HF_HUB_OFFLINE is set: unset it"):
        fetch("org/demo")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    folder = fetch("org/demo")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch("org/demo") == folder
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://user:pass@127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9 can't be reached \(ConnectError") as raised:
        fetch("org/other")
    assert "\n" not in str(raised.value)
    assert "pass" not in str(raised.value)


def test_a_disk_that_is_too_small_is_told_before_anything_comes(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/demo", DEMO | {"model.safetensors": WEIGHTS})
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 0, 70 << 20))
    with pytest.raises(ConfigError, match=r"16 MB are to be fetched, and .* has room for 73 MB: `baton list`"):
        fetch("org/demo")
    assert hub.asked("GET", "/cdn/") == []


def test_it_goes_on_where_a_connection_ended(hub: Hub) -> None:
    hub.add("org/demo", DEMO | {"model.safetensors": WEIGHTS})
    hub.faults.cut_after["model.safetensors"] = [1000, 500_000]
    hub.faults.busy["model.safetensors"] = 2
    assert (fetch("org/demo") / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [one["Range"] for one in hub.asked("GET", "model.safetensors")]
    assert ranges == ["", "", "", "bytes=1000-", "bytes=501000-"]


def test_a_cdn_without_ranges_begins_anew(hub: Hub) -> None:
    hub.add("org/demo", DEMO | {"model.safetensors": WEIGHTS})
    hub.faults.cut_after["model.safetensors"] = [1000]
    hub.faults.no_ranges.add("model.safetensors")
    assert (fetch("org/demo") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_command_that_was_killed_goes_on_with_what_it_had(hub: Hub) -> None:
    hub.add("org/demo", DEMO | {"model.safetensors": WEIGHTS})
    hub.faults.hold["model.safetensors"] = threading.Event()
    first = run(hub, "pull", "org/demo")
    assert hub.halfway.wait(60)
    unfinished = f"{hashlib.sha256(WEIGHTS).hexdigest()}.*"  # the others get their names meanwhile
    while not any(file.stat().st_size > len(WEIGHTS) // 4 for file in names.cache().rglob(unfinished)):
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    assert names.whole(parsed("org/demo") or ("",)) is None  # type: ignore[arg-type]
    assert kept_models() == []
    hub.faults.hold["model.safetensors"].set()
    said: list[str] = []
    folder = by_name("org/demo", said.append, newest=True)
    assert re.search(r"files?, 15 MB, \d+ MB of them are here", said[0])
    last = hub.asked("GET", "model.safetensors")[-1]["Range"]
    assert int(last.removeprefix("bytes=").removesuffix("-")) >= len(WEIGHTS) // 4
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def _wrong(hub: Hub) -> None:
    hub.faults.wrong.add("model.safetensors")


def _longer(hub: Hub) -> None:
    hub.faults.changed["model.safetensors"] = WEIGHTS + b"more"


@pytest.mark.parametrize(("happens", "told"), [(_wrong, "its hash differs"), (_longer, "changed while it was fetched")])
def test_a_file_that_is_another_one_is_not_kept(hub: Hub, happens: Callable[[Hub], None], told: str) -> None:
    hub.add("org/demo", DEMO | {"model.safetensors": WEIGHTS})
    happens(hub)
    with pytest.raises(ConfigError, match=told):
        fetch("org/demo")
    assert names.cached("org/demo") is None
    hub.faults.wrong.clear()
    hub.faults.changed.clear()
    assert (fetch("org/demo") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_pull_brings_what_is_newer_and_shares_what_is_the_same(hub: Hub) -> None:
    old = hub.add("org/demo", DEMO | {"model.safetensors": WEIGHTS})
    assert fetch("org/demo").name == old
    new = hub.add("org/demo", DEMO | {"model.safetensors": WEIGHTS, "LICENSE": b"free"})
    assert fetch("org/demo").name == old
    assert by_name("org/demo", lambda line: None, newest=True).name == new
    assert len(hub.asked("GET", "/cdn/org/demo/")) == 2  # weights and tokenizer, once
    assert {one.name for one in kept_models()} == {f"org/demo@{old[:12]}", "org/demo"}
    for one in kept_models():
        assert (one.is_whole, one.num_bytes - one.shared_bytes) == (True, 4 if one.commit == new else 0)
    assert removed(named_one(f"org/demo@{old[:12]}")) == 0
    assert (fetch("org/demo") / "model.safetensors").read_bytes() == WEIGHTS
    assert removed(named_one("org/demo")) == sum(map(len, DEMO.values())) + len(WEIGHTS) + 4
    assert [*names.cache().glob("models--*")] == []


def test_a_gateway_fetches_the_text_and_a_worker_the_rest(hub: Hub) -> None:
    hub.add("org/demo", DEMO | {"model.safetensors": WEIGHTS})
    folder = brought(Path("org/demo"), lambda line: None, text_alone=True)
    assert not (folder / "model.safetensors").exists()
    settings = load_settings(UpSettings, command="up", arguments=["org/demo"], environment={})
    assert settings.model == folder
    assert brought(settings.model, lambda line: None) == folder
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_what_is_served_is_not_removed_unless_somebody_means_it(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(command: Callable[[], int], *words: str) -> tuple[int, str, str]:
        """Exit code, output and errors of a command."""
        monkeypatch.setattr(sys, "argv", ["baton", *words])
        return command(), *capsys.readouterr()

    monkeypatch.setattr(sys, "stdin", io.StringIO())  # no terminal
    monkeypatch.setattr(show, "fit_here", lambda model: [])  # tests/e2e/test_up_by_name.py has it computed
    hub.add("org/demo", DEMO | {"model.safetensors": WEIGHTS})
    folder = fetch("org/demo")
    assert not is_served(folder)
    serving = subprocess.Popen(
        [sys.executable, "-c", SERVING, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert serving.stdout is not None
    assert serving.stdout.readline() == "serving\n"
    assert is_served(folder)
    assert re.search(r"org/demo .* served$", said(list_main)[1], re.MULTILINE)
    _, shown, _ = said(show.main, "org/demo")
    assert "served by a process of this machine" in shown
    assert "LlamaForCausalLM is served" in shown
    code, _, refused = said(rm_main, "org/demo")
    who = f"decode-0 (process {serving.pid})"
    assert (code, f"org/demo: it is served by {who}: stop that first, or say --yes" in refused) == (2, True)
    for name in (f"org/demo@{folder.name}", str(folder), f"{folder.parent}/../snapshots/{folder.name}"):
        code, _, refused = said(rm_main, name)
        assert (code, f"served by {who}" in refused) == (2, True)
    assert said(rm_main, "org/demo", "--yes")[1].startswith("removed org/demo: 16 MB are free again")
    assert not folder.exists()
    serving.communicate("\n", timeout=60)


def test_a_model_of_a_package_is_not_removed_either_while_it_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], serving: list[IO[str]]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    packaged = names.NAMED["smollm2"]._replace(num_bytes=4)
    monkeypatch.setitem(names.NAMED, "smollm2", packaged)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    file = names.kept("smollm2")
    assert file is not None
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF")

    def said(command: Callable[[], int], *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["baton", *words])
        return command(), *capsys.readouterr()

    locks.serve(file, "pool-0")
    assert re.search(r"smollm2 .* served$", said(list_main)[1], re.MULTILINE)
    code, _, refused = said(rm_main, "smollm2")
    served = f"smollm2: it is served by pool-0 (process {os.getpid()}): stop that first, or say --yes"
    assert (code, served in refused, file.is_file()) == (2, True, True)
    serving.pop().close()
    assert not re.search(r"smollm2 .* served$", said(list_main)[1], re.MULTILINE)
    assert said(rm_main, "smollm2")[0] == 0
    assert not file.exists()


def test_who_serves_is_told_of_those_that_live(hub: Hub, serving: list[IO[str]]) -> None:
    hub.add("org/demo", DEMO | {"model.safetensors": WEIGHTS})
    folder = fetch("org/demo")
    ended = subprocess.Popen([sys.executable, "-c", SERVING, str(folder)], cwd=ROOT, stdout=-1, stdin=-1, text=True)
    assert ended.stdout is not None
    assert ended.stdout.readline() == "serving\n"
    locks.serve(folder, "gateway")
    both = f"decode-0 (process {ended.pid}), gateway (process {os.getpid()})"
    assert locks.servers_of(folder) == both
    ended.kill()
    ended.wait(60)
    assert locks.servers_of(folder) == f"gateway (process {os.getpid()})"
    serving.pop().close()
    assert locks.servers_of(folder) == ""


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[IO[str]]]:
    """The locks that this process holds as one that serves."""
    held: list[IO[str]] = []
    monkeypatch.setattr(locks, "_serving", held)
    yield held
    for lock in held:
        lock.close()


@contextlib.contextmanager
def looked_at(folder: Path) -> Iterator[None]:
    """Context manager: somebody looks whether the model is served, or removes it."""
    lock = locks.lock_file(folder)
    assert lock is not None
    with contextlib.ExitStack() as held:
        assert locks.locked(held, lock)
        yield


def test_who_begins_to_serve_while_somebody_looks_is_seen_all_the_same(hub: Hub, serving: list[IO[str]]) -> None:
    hub.add("org/demo", DEMO | {"model.safetensors": WEIGHTS})
    folder = fetch("org/demo")
    beginning = threading.Thread(target=locks.serve, args=[folder, "w"])
    with looked_at(folder):
        beginning.start()
        beginning.join(0.1)  # an impatient one would end meanwhile, and nobody would know of it
    beginning.join(60)
    assert len(serving) == 1
    assert is_served(folder)
    with pytest.raises(ConfigError, match="it is served"):
        removed(named_one("org/demo"))


def test_two_that_look_at_once_dont_take_each_other_for_one_that_serves(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/demo", DEMO | {"model.safetensors": WEIGHTS})
    folder, look, found = fetch("org/demo"), locks.locked, list[bool]()
    with looked_at(folder):
        """Somebody looked before, so there is a lock."""
    other = threading.Thread(target=lambda: found.append(is_served(folder)))

    def looked(held: contextlib.ExitStack, lock: Path) -> bool:
        told = look(held, lock)
        if other.ident is None:
            other.start()
            other.join(0.1)  # one that doesn't wait would answer now
        return told

    monkeypatch.setattr(locks, "locked", looked)
    assert not is_served(folder)
    other.join(60)
    assert found == [False]


def test_what_two_names_mean_is_removed_once_and_never_while_it_is_fetched(hub: Hub) -> None:
    hub.add("org/demo", DEMO | {"model.safetensors": WEIGHTS})
    folder = fetch("org/demo")
    twice = [*named_one("org/demo"), *named_one(f"org/demo@{folder.name}")]
    with (names.locks_of("org/demo") / names.FETCH_LOCK).open("a") as fetching_it:
        fcntl.flock(fetching_it, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process fetches or removes it"):
            removed(twice)
    assert removed(twice) == sum(map(len, DEMO.values())) + len(WEIGHTS)
    assert not folder.exists()


def test_what_is_being_removed_is_not_served(hub: Hub, serving: list[IO[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/demo", DEMO | {"model.safetensors": WEIGHTS})
    folder = fetch("org/demo")
    monkeypatch.setattr(locks, "REMOVAL_S", 0.0)
    with looked_at(folder), pytest.raises(ConfigError, match="another process removes it"):
        locks.serve(folder, "w")
    assert removed(named_one("org/demo")) > 0
    with pytest.raises(ConfigError, match="removed a moment ago"):
        locks.serve(folder, "w")


SERVING = """
import sys
from pathlib import Path
from services.runtime.models.serving import serve
serve(Path(sys.argv[1]), "decode-0")
print("serving", flush=True)
sys.stdin.readline()
"""
