"""Settings of `baton up`: those of the services that it starts, and its own."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, NamedTuple, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from common.settings import AUTO, ROOT, ConfigError, Form
from modelfiles.pooling import is_pooled
from services.gateway.settings import LOOPBACK, GatewaySettings
from services.planner.settings import PlannerOptions
from services.rank.cores import physical_cores
from services.worker.host_share import HostMB
from services.worker.options import FAKE_DEVICE, MOST_RANKS, STAGES, WorkerOptions

DEMO = ROOT / "demo"
LAST_PORT = 65_535
MOST_WORKERS = 64
AUTO_WORD = "auto"
Devices = Annotated[
    str,
    Field(pattern=rf"^(cpu|cuda|cuda:\d+(,cuda:\d+)*|{FAKE_DEVICE})$"),
    Form("cpu, cuda, GPUs by number, as cuda:0,cuda:1, or fake"),
]


class ByRole(NamedTuple):
    """The ranks of a worker, or its stages, by its role."""

    prefill: int = 1
    decode: int = 1

    @classmethod
    def parse(cls, text: str, what: str = "ranks") -> ByRole:
        """Read `N` for all workers, or `prefill=N,decode=M`. Raises ValueError, which says `what` is counted."""
        if text.isdecimal():
            counts = {"prefill": int(text), "decode": int(text)}
        else:
            pairs = [pair.partition("=") for pair in text.split(",")]
            counts = {role.strip(): int(count) for role, _, count in pairs if count.strip().isdecimal()}
            if len(counts) < len(pairs) or not counts.keys() <= set(cls._fields):
                raise ValueError(f"a number is needed, or prefill=N,decode=M, not {text!r}")
        if not all(1 <= count <= MOST_RANKS for count in counts.values()):
            raise ValueError(f"1 to {MOST_RANKS} {what} are needed, not {text!r}")
        return cls(**counts)

    def of_workers(self, *, prefill: int, decode: int, pool: int) -> list[int]:
        """Those of each of so many workers, those of prefill workers first; one that pools is a single process."""
        return [self.prefill] * prefill + [self.decode] * decode + [1] * pool


class Bounds(NamedTuple):
    """The workers of a role that a model starts with, and to which a planner may bring it."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str, *, fewest: int = 0) -> Bounds:
        """Read `N`, or `N-M`. Raises ValueError."""
        first, dash, last = text.partition("-")
        if not (first.isdecimal() and (not dash or last.isdecimal())):
            raise ValueError(f"a number of workers is needed, or N-M, to which load may bring it, not {text!r}")
        found = cls(int(first), int(last or first))
        if not fewest <= found.least <= found.most <= MOST_WORKERS:
            raise ValueError(f"{fewest} to {MOST_WORKERS} workers are needed, the fewer first, not {text!r}")
        if found.least == 0 < found.most:
            raise ValueError(f"1 to start with is needed, as 1-{found.most}: nothing is counted of a role without one")
        return found


def _are_decoding(text: str) -> str:
    Bounds.parse(text, fewest=1)
    return text


def _are_prefilling(text: str) -> str:
    if text != AUTO_WORD:
        Bounds.parse(text)
    return text


def _are_ranks(text: str) -> str:
    ByRole.parse(text)
    return text


def _are_stages(text: str) -> str:
    ByRole.parse(text, "stages")
    return text


class UpSettings(GatewaySettings, WorkerOptions, PlannerOptions):
    """`baton up`: everything in one command; what it doesn't use itself goes to the services."""

    device: Devices = Field(
        "cpu",
        description="cpu; cuda: a GPU for each worker, in order; cuda:N,cuda:M,…: dealt out in turn; or a fake device",
    )

    tensor_parallel_size: Annotated[str, BeforeValidator(str), AfterValidator(_are_ranks)] = Field(
        "1",
        description="ranks, a process each, that share a worker's model and its KV: heads, intermediate sizes, experts and "
        "vocabulary; with --device cuda each has a GPU; prefill=2,decode=1: by role, 1 for one that isn't named",
    )
    pipeline_parallel_size: Annotated[str, BeforeValidator(str), AfterValidator(_are_stages)] = Field(
        "1", description=f"{STAGES}; prefill=2,decode=1: by role, 1 for one that isn't named"
    )
    nats_url: str = Field("", description="NATS server, with JetStream; empty: one is started")
    redis_url: str = Field("", description="Redis 7.0+ or Valkey server; empty: one is started")
    prefill: Annotated[str, BeforeValidator(str), AfterValidator(_are_prefilling)] = Field(
        AUTO_WORD,
        description="prefill workers of each model; auto: 1, but none for a model of yours on a CPU: decode workers prefill "
        "there, with one copy of the weights",
    )
    decode: Annotated[str, BeforeValidator(str), AfterValidator(_are_decoding)] = Field(
        "1",
        description="decode workers of each model; N-M: N, up to M by the planner's count (--prefill, too)",
    )
    gateways: Annotated[int, Field(ge=1, le=16)] = Field(
        1,
        description="number of gateways, which share --port; each also has a port of its own, from --own-port on, by default "
        "from the one after --port",
    )
    planner: bool = Field(False, description="start a planner as well, which moves workers between the roles")
    max_loaded: Annotated[int, Field(ge=0), AUTO] = Field(
        0,
        description="with --keep-alive: models loaded at once at most; another one that is asked for takes the place of the one "
        "that is idle longest; auto: all",
    )
    data_dir: Path = Field(Path(".baton"), description="where logs and server data go")

    @model_validator(mode="after")
    def _patterns_are_bounded(self) -> Self:
        if self.patterns and not self.max_loaded:
            raise ConfigError(f"--model {self.patterns[0]}: give --max-loaded, how many models may be loaded at once")
        return self

    def shared_out(self) -> UpSettings:
        """Decide what was left open: prefill workers, their threads and host memory, ports (0: a free one), a key.

        Raises ConfigError.
        """
        from services.runtime.servers import free_port  # help waits for no servers

        on_cpu = self.processor == "cpu"
        port = self.port or free_port()
        own_port = self.own_port or (port + 1 if self.gateways > 1 else 0)
        if own_port + self.gateways - 1 > LAST_PORT:
            raise ConfigError(
                f"--own-port {own_port}: --gateways {self.gateways} need that many ports up to {LAST_PORT}"
            )
        if own_port and own_port <= port < own_port + self.gateways:
            raise ConfigError(f"--own-port {own_port}: --port {port} is among the gateways' own: choose another one")
        for flag, public in (("--ollama-port", self.ollama_port), ("--grpc-port", self.grpc_port)):
            if own_port and own_port <= public < own_port + self.gateways:
                raise ConfigError(f"{flag} {public}: is among the gateways' own ports: choose another one")
        is_demo = all(folder.resolve() == DEMO for folder in self.folders.values())
        prefill = str(int(not on_cpu or is_demo)) if self.prefill == AUTO_WORD else self.prefill
        known = self.model_copy(update={"prefill": prefill})
        known._check_bounds()
        threads = self.threads or (max(1, physical_cores() // known.processes_at_once) if on_cpu else 0)
        host = HostMB.parse(self.kv_host_mb).shared_out(known.generators)
        mine = {"threads": threads, "kv_host_mb": host, "port": port, "own_port": own_port}
        return known.model_copy(update=mine | {"orders_key": self.orders_key or self._own_key()})

    def _check_bounds(self) -> None:
        for flag, text, bounds in (
            ("--prefill", self.prefill, self.prefills),
            ("--decode", self.decode, self.decodes),
        ):
            if bounds.most > bounds.least and not self.loads_on_demand:
                raise ConfigError(
                    f"{flag} {text}: a host starts those workers: give --keep-alive, as 5m, or {bounds.least}"
                )
            if bounds.most > bounds.least and not (self.planner or self.nats_url):
                raise ConfigError(f"{flag} {text}: a planner counts those workers: give --planner, or {bounds.least}")

    def _own_key(self) -> str:
        """A random 256-bit admin key, if none was given and only this machine can connect; else ""."""
        is_keyless = not (self.keys or self.tenants or self.admin_key) and self.host in LOOPBACK
        return f"baton-{secrets.token_urlsafe(32)}" if is_keyless else ""

    @property
    def own_ports(self) -> tuple[int, ...]:
        """The gateways' own ports; none if there is a single gateway."""
        return tuple(range(self.own_port, self.own_port + self.gateways)) if self.own_port else ()

    @property
    def generating(self) -> dict[str, Path]:
        """The models that generate text."""
        return {name: folder for name, folder in self.folders.items() if not is_pooled(folder)}

    @property
    def pooling(self) -> dict[str, Path]:
        """The models of vectors and scores, each with as many workers as others have for decoding."""
        return {name: folder for name, folder in self.folders.items() if is_pooled(folder)}

    @property
    def slots(self) -> int:
        """Sets of workers for models that are pulled later: as many as may be loaded at once."""
        return self.max_loaded if self.patterns else 0

    @property
    def workers(self) -> int:
        """The number of workers of all models. Needs known numbers: see `shared_out`."""
        return len(self.widths)

    @property
    def generators(self) -> int:
        """The number of those that generate: others have no KV cache, and no host memory below it."""
        return (self.prefills.most + self.decodes.most) * (len(self.generating) + self.slots)

    @property
    def prefills(self) -> Bounds:
        """The prefill workers of a model. Needs a known number: see `shared_out`."""
        return Bounds.parse(self.prefill)

    @property
    def decodes(self) -> Bounds:
        """The decode workers of a model, or those that pool: of one that isn't pulled the fewest."""
        return Bounds.parse(self.decode)

    @property
    def widths(self) -> list[int]:
        """The ranks of each worker, those of prefill workers first. Needs known numbers: see `shared_out`."""
        return self._of_workers(ByRole.parse(self.tensor_parallel_size))

    @property
    def depths(self) -> list[int]:
        """The stages of each worker, in the same order."""
        return self._of_workers(ByRole.parse(self.pipeline_parallel_size))

    @property
    def processes(self) -> list[int]:
        """The processes of each worker, in the same order."""
        return [width * depth for width, depth in zip(self.widths, self.depths, strict=True)]

    @property
    def processes_at_once(self) -> int:
        """The processes of the models that are loaded at a time, 1 at least."""
        models = len(self.generating) + self.slots
        at_once = min(models, self.max_loaded or models) if self.loads_on_demand else models
        (prefill, decode), (prefill_depth, decode_depth) = map(
            ByRole.parse, (self.tensor_parallel_size, self.pipeline_parallel_size)
        )
        of_a_model = self.prefills.most * prefill * prefill_depth + self.decodes.most * decode * decode_depth
        return max(1, at_once * of_a_model + self.decodes.least * len(self.pooling))

    def _of_workers(self, counts: ByRole) -> list[int]:
        models, pools = len(self.generating) + self.slots, len(self.pooling)
        prefill, decode, pool = self.prefills.most * models, self.decodes.most * models, self.decodes.least * pools
        return counts.of_workers(prefill=prefill, decode=decode, pool=pool)


def devices_of(devices: str, processes: Sequence[int]) -> list[str]:
    """Each worker's device, of several processes the first one's: `cuda` is a GPU for each, a list is dealt out in turn."""
    if devices == "cuda":
        return [f"cuda:{index}" for index in accumulate(processes[:-1], initial=0)] if processes else []
    named = devices.split(",")
    return [named[index % len(named)] for index in range(len(processes))]


def gpus_of(devices: str, processes: Sequence[int]) -> list[str]:
    """The GPUs of all ranks and stages: those of a worker are neighbours."""
    first = [int(device.partition(":")[2] or 0) for device in devices_of(devices, processes)]
    return [f"cuda:{index + rank}" for index, count in zip(first, processes, strict=True) for rank in range(count)]
