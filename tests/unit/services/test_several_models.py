"""`--model` given more than once: names, folders, and the workers that `baton up` starts for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.settings import ROOT, ConfigError
from services.gateway.settings import GatewaySettings
from services.runtime.loading import load_settings
from services.runtime.models.named import all_brought
from services.runtime.permissions import WORKERS
from services.up import settings as up_settings
from services.up.announcement import welcome
from services.up.members import Deals, Hosted, members_of, models_of_workers
from services.up.settings import UpSettings
from tests.late_models import build_colbert
from tests.pooling_models import build_pooling_model


def up(*arguments: str) -> UpSettings:
    return load_settings(UpSettings, command="up", arguments=arguments, environment={}).shared_out()


def _found(settings: GatewaySettings) -> dict[str, Path]:
    return {name: folder.resolve() for name, folder in settings.folders.items()}


def test_each_model_is_called_as_its_folder_or_as_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "coder-7b"
    folder.mkdir()
    for kind, command in ((UpSettings, "up"), (GatewaySettings, "gateway")):
        arguments = ["--model", "demo", "--model", str(folder), "--model", f"chat={folder}"]
        settings = load_settings(kind, command=command, arguments=arguments, environment={})
        assert _found(settings) == {"demo": ROOT / "demo", "coder-7b": folder, "chat": folder}
        assert settings.model.resolve() == ROOT / "demo"


def test_one_model_is_as_before(tmp_path: Path) -> None:
    folder = tmp_path / "a,b"
    folder.mkdir()
    assert _found(up("--model", str(folder))) == {"a,b": folder}
    assert _found(up("--model", "demo", "--served-model-name", "x")) == {"x": ROOT / "demo"}
    assert _found(up("--model", "x=demo")) == {"x": ROOT / "demo"}
    even = tmp_path / "a=b"
    even.mkdir()
    assert _found(up("--model", str(even))) == {"a=b": even}


def test_the_welcome_counts_workers_of_each_model(tmp_path: Path) -> None:
    pooled = build_pooling_model(tmp_path / "mini")
    for models, told in (
        (("demo",), ": 0 prefill and 1 decode, transport"),
        ((f"mini={pooled}",), ": 1 pool, transport"),
        (("demo", f"a={pooled}", f"b={pooled}"), ": 0 prefill and 1 decode, 1 pool for each of 2, transport"),
        (("demo", "a=demo"), ": 0 prefill and 1 decode for each of 2, transport"),
    ):
        flags = [flag for model in models for flag in ("--model", model)]
        said = welcome(up(*flags, "--prefill", "0"), "http://here", tmp_path, seconds=1.0)
        assert told in said
        assert ("baton embed" in said) == any(str(pooled) in model for model in models)


def test_the_first_request_is_one_that_the_model_answers(tmp_path: Path) -> None:
    made = {
        "mini": (build_pooling_model(tmp_path / "mini"), "/v1/embeddings"),
        "late": (build_colbert(tmp_path / "late"), "/v1/rerank"),
        "cross": (build_pooling_model(tmp_path / "cross", "BertForSequenceClassification", num_labels=1), "/v1/rerank"),
        "mood": (build_pooling_model(tmp_path / "mood", "BertForSequenceClassification", num_labels=3), "/v1/classify"),
    }
    for name, (folder, path) in made.items():
        model = {"id": name, "capabilities": ["embedding"], "whole_model_len": None}
        said = welcome(up("--model", f"{name}={folder}"), "http://here", tmp_path, models=[model], seconds=1.0)
        assert f"curl http://here{path} " in said


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--model", "demo", "--model", "demo"), "two models are called 'demo'"),
        (("--model", "demo", "--model", "a=demo", "--served-model-name", "b"), "write --model NAME=FOLDER"),
        (("--model", "demo", "--model", "a=demo", "--served-models", "b=demo"), "give one of the two"),
        (("--model", "demo", "--model", "=demo"), "is not name=folder"),
    ],
)
def test_what_names_no_models_is_refused_with_the_remedy(arguments: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        up(*arguments)


def test_each_model_has_workers_of_both_roles() -> None:
    settings = up("--model", "a=demo", "--model", "b=demo", "--prefill", "1", "--decode", "2")
    workers = [name for name, member in members_of(settings, "tag").items() if member.role != "gateway"]
    models = [model.name for model in models_of_workers(settings)]
    assert list(zip(workers, models, strict=True)) == [
        *(("prefill-0", "a"), ("prefill-1", "b")),
        *(("decode-0", "a"), ("decode-1", "b"), ("decode-2", "a"), ("decode-3", "b")),
    ]
    assert settings.workers == 6


def test_more_workers_of_a_role_are_spare_and_have_processors_and_devices_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(up_settings, "physical_cores", lambda: 12)
    asked = [
        "--model",
        f"a={ROOT / 'demo'}",
        "--model",
        "org/*",
        "--keep-alive",
        "5m",
        "--max-loaded",
        "1",
        "--planner",
    ]
    settings = up(*asked, "--prefill", "0", "--decode", "2-3", "--device", "fake")
    hosted, deals = Hosted(settings), Deals(settings)
    workers = [(name, one) for name, one in members_of(settings, "t").items() if one.role in (*WORKERS, "pool")]
    for (name, member), model in zip(workers, models_of_workers(settings), strict=True):
        slot = hosted.of(model) if member.role == "pool" else []
        hosted.add(model, name, member, deals.beside(slot) if slot else deals.next(), tmp_path)
    plan = hosted.plan()
    assert plan.pulled is not None
    assert {name: [one.name for one in each] for name, each in plan.models.items()} == {"a": ["decode-0", "decode-2"]}
    assert {name: [one.name for one in each] for name, each in plan.spares.items()} == {"a": ["decode-4"]}
    (slot,), (spare,) = plan.pulled.slots, plan.pulled.spares
    assert [one.name for one in slot] == ["decode-1", "decode-3", "pool-0", "pool-1"]
    assert [one.name for one in spare] == ["decode-5", "pool-2"]
    assert settings.threads == 4  # of a model that is loaded with all its workers
    assert {one.threads for one in (*plan.models["a"], *plan.spares["a"])} == {4}
    assert settings.workers == settings.generators == 6


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--decode", "1-2", "--planner"], "--decode 1-2: a host starts those workers: give --keep-alive"),
        (["--prefill", "1-2", "--keep-alive", "5m"], "--prefill 1-2: a planner counts those workers: give --planner"),
        (["--prefill", "0-2"], "1 to start with is needed, as 1-2"),
        (["--decode", "3-2"], "1 to 64 workers are needed, the fewer first, not '3-2'"),
        (["--decode", "0"], "1 to 64 workers are needed"),
        (["--decode", "1-65"], "1 to 64 workers are needed"),
        (["--decode", "few"], "a number of workers is needed, or N-M"),
        (["--prefill", "1-"], "a number of workers is needed, or N-M"),
    ],
)
def test_more_workers_need_who_counts_and_who_starts_them(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        up(*words)


def test_processors_are_shared_out_among_the_workers_of_all_models() -> None:
    alone, both = up("--model", "a=demo"), up("--model", "a=demo", "--model", "b=demo")
    assert both.threads == max(1, alone.threads // 2)


def test_processors_are_shared_out_among_the_models_that_are_loaded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up_settings, "physical_cores", lambda: 48)
    several = [word for name in "abc" for word in ("--model", f"{name}=demo")] + ["--prefill", "1", "-tp", "prefill=2"]
    assert up(*several).threads == 48 // 9
    on_demand = [*several, "--keep-alive", "5m"]
    assert up(*on_demand).threads == 48 // 9
    assert up(*on_demand, "--max-loaded", "1").threads == 48 // 3
    assert up(*on_demand, "--max-loaded", "2").threads == 48 // 6
    assert up(*on_demand, "--model", "org/*", "--max-loaded", "2").threads == 48 // 6
    assert up(*on_demand, "--max-loaded", "9").threads == 48 // 9


PULLING = ("--model", "a=demo", "--model", "org/*", "--keep-alive", "5m")


def test_a_pattern_of_names_gets_as_many_sets_of_workers_as_are_loaded_at_once() -> None:
    settings = up(*PULLING, "--model", "s3://models/*", "--max-loaded", "2", "--prefill", "1")
    assert settings.patterns == ("org/*", "s3://models/*")
    assert list(_found(settings)) == ["a"]
    workers = [name for name, member in members_of(settings, "tag").items() if member.role in (*WORKERS, "pool")]
    models = [model.name for model in models_of_workers(settings)]
    assert list(zip(workers, models, strict=True)) == [
        *(("prefill-0", "a"), ("prefill-1", "*0"), ("prefill-2", "*1")),
        *(("decode-0", "a"), ("decode-1", "*0"), ("decode-2", "*1")),
        *(("pool-0", "*0"), ("pool-1", "*1")),
    ]
    assert len(settings.widths) == 6
    kept = all_brought(settings, print, text_alone=True)
    assert (kept.patterns, _found(kept)) == (settings.patterns, _found(settings))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--model", "org/*", "--keep-alive", "5m", "--max-loaded", "1"), r"write --model demo --model 'org/\*'\Z"),
        (PULLING[:4], r"--model org/\*: such models are loaded on demand: give --keep-alive"),
        (PULLING, r"--model org/\*: give --max-loaded"),
        (("--served-models", "a=demo,org=*"), "a pattern of names has"),
        (("--served-models", "a=demo,org/*=demo"), "a pattern of names has"),
    ],
)
def test_a_pattern_without_its_bounds_is_refused_with_the_remedy(arguments: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        up(*arguments)
