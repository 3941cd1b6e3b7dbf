"""`--kv-events-config` is read as vLLM reads it, and a wrong one names its field and the remedy."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.settings import ConfigError
from services.runtime.loading import load_settings
from services.worker import kv_events
from services.worker.kv_events import KVEventsConfig, of_ranks
from services.worker.settings import WorkerServiceSettings
from worker.events.settings import EventsSettings

ON: dict[str, Any] = {"enable_kv_cache_events": True}


def parsed(**fields: Any) -> EventsSettings:
    config = KVEventsConfig.parse(json.dumps(ON | fields))
    assert config is not None
    return config.settings(worker="worker-0", model="llama")


def test_none_are_published_unless_asked_for() -> None:
    assert KVEventsConfig.parse("") is None
    assert KVEventsConfig.parse("{}") is None
    assert KVEventsConfig.parse(json.dumps(ON | {"publisher": "null"})) is None


def test_addresses_are_vllm_s_but_reached_only_from_this_machine_unless_said() -> None:
    plain = parsed()
    assert (plain.endpoint, plain.binds, plain.replay_endpoint) == ("tcp://127.0.0.1:5557", True, None)
    assert plain.topic == "kv@worker-0@llama"
    assert (plain.buffer_steps, plain.hwm, plain.max_queue_size) == (10_000, 100_000, 100_000)
    assert parsed(data_parallel_rank=1).binds
    assert parsed(endpoint="tcp://*:5557").binds
    assert not parsed(endpoint="tcp://router:5557").binds
    assert parsed(endpoint="tcp://127.0.0.1:5557", bind=True).binds
    assert parsed(endpoint="ipc:///tmp/events", data_parallel_rank=1).endpoint == "ipc:///tmp/events_dp1"


def test_each_worker_of_a_pod_has_ports_of_its_own() -> None:
    text = json.dumps(ON | {"replay_endpoint": "tcp://*:5561"})
    each = [KVEventsConfig.parse(one) for one in of_ranks(text, 3)]
    settings = [one.settings(worker="w", model="m") for one in each if one is not None]
    assert [one.endpoint for one in settings] == [f"tcp://127.0.0.1:{port}" for port in (5557, 5558, 5559)]
    assert [one.replay_endpoint for one in settings] == ["tcp://*:5561", "tcp://*:5562", "tcp://*:5563"]
    assert [one.data_parallel_rank for one in settings] == [0, 1, 2]
    assert of_ranks("", 2) == ["", ""]
    with pytest.raises(ConfigError, match="2 or more apart"):
        of_ranks(json.dumps(ON | {"replay_endpoint": "tcp://*:5558"}), 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kv", "a JSON object is needed, such as {"),
        ("[]", "a JSON object is needed, such as {"),
        ('{"enable": true}', "enable: .*there are enable_kv_cache_events"),
        ('{"endpoint": "http://x"}', "endpoint: tcp://HOST:PORT or ipc://PATH is needed"),
        ('{"buffer_steps": 0}', "buffer_steps: "),
        ("[" * 4000, "a JSON object is needed"),
        ("x" * 5000, "4096"),
    ],
)
def test_a_wrong_one_stops_the_start_and_says_why(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_settings(WorkerServiceSettings, command="worker", arguments=["--kv-events-config", text], environment={})


def test_without_pyzmq_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "find_spec", lambda _: None)
    assert KVEventsConfig.parse("{}") is None
    with pytest.raises(ValueError, match="extra 'events'"):
        KVEventsConfig.parse(json.dumps(ON))
