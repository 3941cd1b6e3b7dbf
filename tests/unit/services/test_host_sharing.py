"""The choice among hosts that offer the same model: the one that loads it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from common.messages import HostedModel, HostState
from common.settings import ConfigError
from common.words import HostStatus
from services.host import written
from services.host.sharing import HAVE, leaves_to
from services.host.written import read_written
from tests.models import build_tiny_model

GIB = 1 << 30


def host(name: str, status: HostStatus = HostStatus.UNLOADED, **room: Any) -> HostState:
    options: dict[str, Any] = {"free_places": 1, "free_bytes": 8 * GIB, "shares": True} | room
    return HostState(host=name, incarnation=1, models={"m": HostedModel(status=status)}, **options)


def test_who_has_it_keeps_it_else_it_goes_where_it_sleeps_or_most_room_is() -> None:
    own = host("b")
    assert leaves_to("m", own, []) == ""
    for status in HAVE:
        assert leaves_to("m", own, [host("a", status, free_places=0)]) == "a"
    assert leaves_to("m", own, [host("a", HostStatus.PARKED, free_places=0)]) == "a"
    assert leaves_to("m", own, [host("a", free_bytes=16 * GIB)]) == "a"
    assert leaves_to("m", own, [host("a", free_bytes=16 * GIB, free_places=0)]) == ""
    assert leaves_to("m", own, [host("a", free_bytes=8 * GIB + 1)]) == ""  # about the same: the names decide
    assert leaves_to("m", own, [host("a", free_cards=1)]) == "a"


def test_nobody_waits_for_a_host_that_failed_or_heeds_no_other_one() -> None:
    own = host("b", free_bytes=GIB)
    assert leaves_to("m", own, [host("z", HostStatus.FAILED)]) == ""
    assert leaves_to("m", own, [host("z", shares=False)]) == ""
    other = HostState(host="z", incarnation=1, models={"other": HostedModel()}, shares=True, free_places=9)
    assert leaves_to("m", own, [other]) == ""
    assert leaves_to("m", host("b", HostStatus.FAILED), [host("c", HostStatus.FAILED)]) == ""  # each by itself


def test_of_hosts_that_hear_each_other_exactly_one_loads() -> None:
    chance = random.Random(5)
    statuses = (HostStatus.UNLOADED, HostStatus.PARKED, HostStatus.UNLOADING)
    for _ in range(500):
        hosts = [
            host(
                name,
                chance.choice(statuses),
                free_places=chance.randrange(3),
                free_cards=chance.randrange(3),
                free_bytes=chance.randrange(4 * GIB),
            )
            for name in "abcde"[: chance.randint(1, 5)]
        ]
        loads = [own for own in hosts if not leaves_to("m", own, [one for one in hosts if one is not own])]
        assert len(loads) == 1


PLAN = 'name = "h"\n[options]\nkv_memory_mb = 8\n[[worker]]\nmodel = "m"\nservice = "decode"\ncount = 2\n'


def test_a_hosts_file_names_its_workers_and_their_settings(tmp_path: Path) -> None:
    file = tmp_path / "host.toml"
    file.write_text('sleeps = "1h"\n' + PLAN + 'options = { model = "demo", device = "fake" }\n')
    name, plan = read_written(file)
    assert (name, plan.parks_s, plan.stays_awake, plan.forks) == ("h", 3600.0, "", True)
    assert [worker.id for worker in plan.models["m"]] == ["h-decode-0", "h-decode-1"]
    variables = plan.models["m"][0].variables
    assert (variables["BATON_KV_MEMORY_MB"], variables["BATON_SERVED_MODEL_NAME"]) == ("8", "m")
    assert (tmp_path / "logs").is_dir()


@pytest.mark.usefixtures("judged_here")
def test_an_entry_with_a_bound_has_spare_workers_beside_those_that_start(tmp_path: Path) -> None:
    file = tmp_path / "host.toml"
    file.write_text(PLAN + 'most = 4\noptions = { device = "fake" }\n[[worker]]\nmodel = "m"\nservice = "prefill"\n')
    _, plan = read_written(file)
    assert [worker.id for worker in plan.models["m"]] == ["h-decode-0", "h-decode-1", "h-prefill-4"]
    assert [worker.id for worker in plan.spares["m"]] == ["h-decode-2", "h-decode-3"]
    assert plan.spares["m"][0].variables["BATON_WORKER_ID"] == "h-decode-2"


@pytest.mark.usefixtures("judged_here")
def test_what_a_model_and_its_spare_workers_take_of_the_machine_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written, "physical_cores", lambda: 8)
    model = build_tiny_model(tmp_path / "model", "llama")
    file = tmp_path / "host.toml"
    text = PLAN + f'most = 3\noptions = {{ model = "{model}", threads = 2 }}\n'
    file.write_text(text)
    _, plan = read_written(file)
    (spare,) = plan.spares["m"]
    assert spare.needs_bytes > 8 << 20
    assert plan.needs_bytes == {"m": 2 * spare.needs_bytes}
    assert [worker.threads for worker in (*plan.models["m"], spare)] == [2, 2, 2]
    file.write_text(text.replace("kv_memory_mb = 8", f"kv_memory_mb = {1 << 30}"))
    with pytest.raises(ConfigError, match=r"most of m: its 3 workers need .* smaller most or kv_memory_mb"):
        read_written(file)


PULLED = (
    'name = "h"\nmax_loaded = 2\n[pulled]\nmodels = ["org/*"]\n[[pulled.worker]]\nservice = "decode"\n'
    '[[pulled.worker]]\nservice = "prefill"\noptions = { device = "fake" }\n'
)


@pytest.mark.usefixtures("judged_here")
def test_a_hosts_file_has_slots_of_workers_for_models_that_are_pulled(tmp_path: Path) -> None:
    file = tmp_path / "host.toml"
    file.write_text(PULLED + '[[worker]]\nmodel = "m"\noptions = { model = "demo" }\n')
    _, plan = read_written(file)
    assert plan.pulled is not None
    assert plan.pulled.patterns == ("org/*",)
    assert [[worker.id for worker in slot] for slot in plan.pulled.slots] == [
        ["h-decode-1", "h-prefill-2"],
        ["h-decode-3", "h-prefill-4"],
    ]
    assert plan.pulled.slots[1][1].variables["BATON_DEVICE"] == "fake"
    assert list(plan.models) == ["m"]
    assert not plan.follows_a_planner
    file.write_text(PULLED.replace('"decode"', '"decode"\nmost = 2'))
    _, plan = read_written(file)
    assert plan.pulled is not None
    assert plan.follows_a_planner
    assert [[worker.id for worker in slot] for slot in plan.pulled.slots] == [
        ["h-decode-0", "h-prefill-2"],
        ["h-decode-3", "h-prefill-5"],
    ]
    assert [[worker.id for worker in slot] for slot in plan.pulled.spares] == [["h-decode-1"], ["h-decode-4"]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PULLED.replace("max_loaded = 2\n", ""), "max_loaded: with pulled models 1 to 64"),
        (PULLED.replace('"org/*"', ""), "pulled: give models"),
        (PULLED.replace('"decode"', '"decode"\nmodel = "m"'), "pulled.worker: leave model 'm' out"),
        (PULLED.replace("{ device", '{ model = "demo", device'), "pulled.worker: leave model 'demo' out"),
        (PULLED.replace("device", "devices"), "has no setting 'devices'"),
        (PLAN.replace('model = "m"\n', ""), "worker: a decode has no model"),
        ('name = "a b"\nworker = []\n', "'a b' is not a valid id"),
        ('name = "h"\nworker = []\n', "worker: name at least one"),
        (PLAN.replace("decode", "gateway"), "service 'gateway': is one of prefill, decode, worker, pool"),
        (PLAN.replace("count = 2", "count = 65"), "count 65 of m: is 1 to 64"),
        (PLAN.replace("count = 2", "count = 0"), "count 0 of m: is 1 to 64, or 0 beside most"),
        (PLAN + "most = 1\n", "most 1 of m: is count, here 2, to 64; leave it out for count"),
        (PLAN + "most = -1\n", "most -1 of m: is count, here 2, to 64"),
        (PLAN + "most = 65\n", "most 65 of m: is count, here 2, to 64"),
        (PLAN.replace("count = 2", "count = 0\nmost = 2"), "count of m: give one of its entries a count of 1 or more"),
        (
            PLAN + "most = 3\noptions = { threads = 1024 }\n",
            "most of m: its 3 workers have 3072 threads, .* give a smaller",
        ),
        (
            PULLED.replace('"decode"', '"decode"\nmost = 2\ncount = 0').replace('"prefill"', '"pool"'),
            "pulled.worker: give one with service prefill, decode or worker a count of 1 or more",
        ),
        (
            PULLED.replace('"decode"', '"decode"\nmost = 3\noptions = { threads = 1024 }'),
            "most of pulled.worker: the 4 workers of a model have 3072 threads, .* give a smaller",
        ),
        (PLAN.replace("kv_memory_mb", "kv_memory"), "has no setting 'kv_memory'"),
        (PLAN.replace("= 8", "= -8"), "decode-0 of m: --kv-memory-mb"),
        (PLAN + "surplus = 1\n", "surplus"),
        (PLAN + "# a comment\n" * 100_000 + PLAN, "1048576 at most"),  # the beginning alone would be a plan
        ('sleeps = "soon"\n' + PLAN, "'soon' is not like 300"),
    ],
)
def test_a_wrong_file_is_refused_with_the_field(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "host.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said) as refused:
        read_written(file)
    assert str(file) in str(refused.value)
