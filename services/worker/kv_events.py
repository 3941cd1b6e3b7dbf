"""`--kv-events-config`: KV events, in vLLM's form."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.settings import ConfigError
from worker.events.settings import EventsSettings

MOST_CHARS = 4096
DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"  # events tell all prompts to whoever reads them
EXAMPLE = '{"enable_kv_cache_events": true}'
ADDRESS = r"^(tcp://.+:\d{1,5}|ipc://.+)$"
Address = Annotated[str, Field(pattern=ADDRESS, max_length=512)]
Bound = Annotated[int, Field(ge=1, le=10_000_000, strict=True)]


class KVEventsConfig(BaseModel):
    """vLLM's fields; and `bind` for an address of this machine, which vLLM would connect to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: Address = DEFAULT_ENDPOINT
    replay_endpoint: Address | None = None
    buffer_steps: Bound = 10_000
    hwm: Bound = 100_000
    max_queue_size: Bound = 100_000
    topic: Annotated[str, Field(max_length=1024)] = ""
    bind: bool | None = None
    data_parallel_rank: Annotated[int, Field(ge=0, le=4095, strict=True)] = 0

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    @classmethod
    def parse(cls, text: str) -> KVEventsConfig | None:
        """Read a JSON object; None if no events are wanted. Raises ValueError, naming the field and the remedy."""
        if not text:
            return None
        if len(text) > MOST_CHARS:
            raise ValueError(f"at most {MOST_CHARS} characters are read")
        try:
            config = cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name, kind = ".".join(map(str, first["loc"])), first["type"]
            if kind in {"json_invalid", "model_type"}:
                text = f"a JSON object is needed, such as {EXAMPLE}"
            elif kind == "extra_forbidden":
                text = f"{name}: unknown; there are {', '.join(cls.model_fields)}"
            elif kind == "string_pattern_mismatch":
                text = f"{name}: tcp://HOST:PORT or ipc://PATH is needed"
            else:
                text = f"{name}: {first['msg'][:1].lower()}{first['msg'][1:]}"
            raise ValueError(text) from None
        if config.is_on and find_spec("zmq") is None:
            raise ValueError("pyzmq is not installed: pip install the extra 'events' (pyproject.toml)")
        return config if config.is_on else None

    def settings(self, *, worker: str, model: str) -> EventsSettings:
        """A worker's addresses, whose ports its rank is added to. Without a topic it is the worker's name."""
        binds = self.bind
        if binds is None:
            is_everywhere = "*" in self.endpoint or "::" in self.endpoint
            binds = is_everywhere or self.endpoint == DEFAULT_ENDPOINT or self.endpoint.startswith("ipc:")
        replay = self.replay_endpoint
        return EventsSettings(
            endpoint=_of_rank(self.endpoint, self.data_parallel_rank),
            replay_endpoint=None if replay is None else _of_rank(replay, self.data_parallel_rank),
            binds=binds,
            topic=self.topic or f"kv@{worker}@{model}",
            data_parallel_rank=self.data_parallel_rank,
            buffer_steps=self.buffer_steps,
            hwm=self.hwm,
            max_queue_size=self.max_queue_size,
        )


def of_ranks(text: str, count: int) -> list[str]:
    """The setting of each of so many workers of one pod. Raises ConfigError if two would take the same address."""
    config = KVEventsConfig.parse(text)
    if config is None:
        return [text] * count
    ranks = range(config.data_parallel_rank, config.data_parallel_rank + count)
    each = [config.model_copy(update={"data_parallel_rank": rank}) for rank in ranks]
    used = [_of_rank(one, rank) for rank in ranks for one in (config.endpoint, config.replay_endpoint) if one]
    if len({_port(one) for one in used}) < len(used):
        raise ConfigError(
            f"--kv-events-config: {count} workers take as many ports from endpoint and from replay_endpoint on, which overlap: "
            f"set them {count} or more apart"
        )
    return [one.model_dump_json(exclude_defaults=True) for one in each]


def _of_rank(endpoint: str, rank: int) -> str:
    """The address with the rank added to its port."""
    if not endpoint.startswith("tcp:"):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"


def _port(endpoint: str) -> str:
    found = re.search(r":(\d+)$", endpoint)
    return found[1] if found else endpoint
