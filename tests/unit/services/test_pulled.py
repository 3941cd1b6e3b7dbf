"""Models of the cache that a host finds by their names, and the sets of workers that they get."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from common.settings import ROOT
from services.host import pulled
from services.host.plan import HostedWorker, PulledPlan
from services.host.pulled import PulledModels

COMMIT = "a" * 40


def slot(number: int, **variables: str) -> list[HostedWorker]:
    return [
        HostedWorker(
            name=f"w-{number}",
            id=f"h-worker-{number}",
            service="worker",
            variables={"BATON_KV_MEMORY_MB": "8", **variables},
            log_file="log",
        )
    ]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def put(cache: Path, name: str, *, revision: str = "main", without: str = "") -> Path:
    """The demo's files as the snapshot of a model."""
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        if file != without:
            shutil.copyfile(ROOT / "demo" / file, snapshot / file)
    (repo / "refs").mkdir()
    (repo / "refs" / revision).write_text(COMMIT)
    return snapshot


def test_whole_models_of_main_whose_names_are_allowed_are_found_as_they_come_and_go(cache: Path) -> None:
    models = PulledModels(PulledPlan(patterns=("org/*", "own/a"), slots=[slot(0)]))
    assert models.look() == {}
    snapshot = put(cache, "org/demo", without="model.safetensors")
    put(cache, "other/demo")
    put(cache, "own/a", revision="v2")
    assert models.look() == {}
    shutil.copyfile(ROOT / "demo" / "model.safetensors", snapshot / "model.safetensors")
    found = models.look()
    assert list(found) == ["org/demo"]
    assert found["org/demo"].folder == snapshot
    size = (snapshot / "model.safetensors").stat().st_size  # with its header
    assert size + (8 << 20) > found["org/demo"].needs_bytes > size * 99 // 100 + (8 << 20)
    assert models.look() is found  # nothing changed
    shutil.rmtree(cache / "models--org--demo")
    assert models.look() == {}


def test_no_more_models_are_offered_than_the_bound(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulled, "MAX_OFFERED", 2)
    for name in "abc":
        put(cache, f"org/{name}")
    assert list(PulledModels(PulledPlan(patterns=("*",), slots=[slot(0)])).look()) == ["org/a", "org/b"]


def test_one_that_the_workers_settings_do_not_suit_is_left_out(cache: Path) -> None:
    put(cache, "org/demo")
    plan = PulledPlan(patterns=("*",), slots=[slot(0, BATON_KV_MEMORY_MB="-8")])
    assert PulledModels(plan).look() == {}


def test_a_model_of_vectors_has_the_workers_of_a_slot_that_pool(cache: Path) -> None:
    put(cache, "org/demo")
    vectors = put(cache, "org/vectors")
    fields = json.loads((vectors / "config.json").read_text()) | {"architectures": ["Qwen3Model"]}
    (vectors / "config.json").write_text(json.dumps(fields))
    (vectors / "modules.json").write_text("[]")
    pool = msgspec.structs.replace(slot(0)[0], service="pool", id="h-pool-0")
    both = PulledModels(PulledPlan(patterns=("*",), slots=[[*slot(0), pool]]))
    found = both.look()
    assert found["org/demo"].needs_bytes == found["org/vectors"].needs_bytes, "as much for prefixes as for KV"
    assert [worker.service for worker in both.take("org/vectors", found["org/vectors"])] == ["pool"]
    both.give_back("org/vectors")
    assert [worker.service for worker in both.take("org/demo", found["org/demo"])] == ["worker"]
    assert list(PulledModels(PulledPlan(patterns=("*",), slots=[slot(0)])).look()) == ["org/demo"]
    assert list(PulledModels(PulledPlan(patterns=("*",), slots=[[pool]])).look()) == ["org/vectors"]


def test_a_slots_spare_workers_are_a_models_own_until_the_last_of_them_has_ended(cache: Path) -> None:
    for name in "ab":
        put(cache, f"org/{name}")
    spares = [slot(10), slot(11, BATON_KV_MEMORY_MB="16")]
    models = PulledModels(PulledPlan(patterns=("*",), slots=[slot(0), slot(1)], spares=spares))
    found = models.look()
    a, b = (found[name] for name in ("org/a", "org/b"))
    assert [worker.id for worker in models.next_workers("org/b", b)] == ["h-worker-0"]
    (first,) = models.spares("org/a", a)
    assert (first.id, first.needs_bytes) == ("h-worker-10", a.needs_bytes)
    assert (first.variables["BATON_MODEL"], first.variables["BATON_SERVED_MODEL_NAME"]) == (str(a.folder), "org/a")
    for _ in range(2):  # its own workers, and a spare one
        assert [worker.id for worker in models.take("org/a", a)] == ["h-worker-0"]
    assert [worker.id for worker in models.spares("org/b", b)] == ["h-worker-11"]
    models.take("org/b", b)
    models.give_back("org/a")
    assert models.has_a_slot("org/a")
    models.give_back("org/b")
    assert not models.has_a_slot("org/b")
    assert [worker.id for worker in models.take("org/b", b)] == ["h-worker-1"]


@pytest.mark.usefixtures("judged_here")
def test_a_model_that_spare_workers_cant_serve_is_left_out(cache: Path) -> None:
    put(cache, "org/demo")
    spares = [slot(1, BATON_TENSOR_PARALLEL_SIZE="3")]
    assert PulledModels(PulledPlan(patterns=("*",), slots=[slot(0)], spares=spares)).look() == {}


@pytest.mark.usefixtures("judged_here")
@pytest.mark.parametrize("variables", [{"BATON_TENSOR_PARALLEL_SIZE": "3"}, {"BATON_PIPELINE_PARALLEL_SIZE": "64"}])
def test_a_model_that_ranks_cant_share_is_left_out_with_what_its_worker_would_say(
    cache: Path, variables: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    put(cache, "org/demo")
    assert PulledModels(PulledPlan(patterns=("*",), slots=[slot(0, **variables)])).look() == {}
    (told,) = (vars(record)["why"] for record in caplog.records if record.message == "host.model_refused")
    assert "take" in told
    assert ("ranks can't share" in told) or ("a stage of 0 of" in told)


def test_one_of_no_family_is_left_out(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = put(cache, "org/other")
    (folder / "config.json").write_text('{"architectures": ["FooForCausalLM"]}')
    assert PulledModels(PulledPlan(patterns=("*",), slots=[slot(0)])).look() == {}
    assert "FooForCausalLM is not served" in str([vars(record).get("why") for record in caplog.records])


def test_each_loaded_model_has_a_slot_of_its_own_until_its_workers_have_ended(cache: Path) -> None:
    for name in "abc":
        put(cache, f"org/{name}")
    models = PulledModels(PulledPlan(patterns=("*",), slots=[slot(0), slot(1)]))
    found = models.look()
    a, b = (models.take(name, found[name]) for name in ("org/a", "org/b"))
    assert {worker.id for worker in (*a, *b)} == {"h-worker-0", "h-worker-1"}
    own = a[0].variables
    assert (own["BATON_MODEL"], own["BATON_SERVED_MODEL_NAME"]) == (str(found["org/a"].folder), "org/a")
    assert models.take("org/a", found["org/a"]) == a
    assert models.take("org/c", found["org/c"]) == []
    models.give_back("org/a")
    models.give_back("org/a")
    assert [worker.id for worker in models.take("org/c", found["org/c"])] == [a[0].id]
    assert models.take("org/a", found["org/a"]) == []
