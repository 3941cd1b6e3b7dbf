"""Settings: one documented set, by flag, `BATON_…` variable or file, checked at start.

Precedence: flag > variable > file (`--config baton.toml`) > default. A name that nobody knows stops the start, with the nearest
known one; so does a value that can't be. Nothing else in Baton reads the environment.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

PREFIX = "BATON_"
FLAGS = {"json_file": "--json", "print_json": "--json"}  # where a field can't have the flag's name
ROOT = Path(__file__).resolve().parents[1]
LOOPBACK = ("127.0.0.1", "localhost", "::1")
Port = Annotated[int, Field(ge=0, le=65_535)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Share = Annotated[float, Field(gt=0, le=1)]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]
Devices = Annotated[str, Field(pattern=r"^(cpu|cuda|cuda:\d+(,cuda:\d+)*)$")]
Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,64}$")]


class ConfigError(Exception):
    """A setting is wrong. The message names the flag and says what to do."""


class NatsOptions(BaseModel):
    """How to reach NATS."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    nats_url: str = Field("nats://127.0.0.1:4222", description="NATS server, with JetStream; tls:// encrypts")
    nats_credentials: str = Field("", description="file with user:password for NATS")
    nats_ca: str = Field("", description="who signs NATS's certificate (PEM); empty: the system's authorities")
    nats_cert: str = Field("", description="certificate of this process for NATS (PEM)")
    nats_key: str = Field("", description="its key (PEM)")


class Settings(NatsOptions):
    """What every service has."""

    redis_url: str = Field("redis://127.0.0.1:6379", description="Redis 7.0+ or Valkey server; rediss:// encrypts")
    redis_credentials: str = Field("", description="file with user:password for Redis")
    redis_ca: str = Field("", description="who signs Redis's certificate (PEM); empty: the system's authorities")
    redis_cert: str = Field("", description="certificate of this process for Redis (PEM)")
    redis_key: str = Field("", description="its key (PEM)")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe log lines shown")
    log_format: Literal["text", "json"] = Field("text", description="log lines for people or for machines")
    drain_s: Seconds = Field(30.0, description="longest wait for running requests when told to stop")
    otlp_endpoint: Annotated[str, Field(pattern=r"^(https?://[^\s/]+(/\S*)?)?$")] = Field(
        "", description="OpenTelemetry collector for traces, e.g. http://127.0.0.1:4318; empty: no traces"
    )
    trace_rest_share: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0, description="share of the traces that is sent of requests that were neither slow nor failed nor moved"
    )


class ModelSettings(Settings):
    """What services that know the model have."""

    model: Path = Field(Path("models/demo"), validate_default=True, description="Hugging Face model folder")
    served_model_name: str = Field("", description="name in the API; empty: the folder's name")

    @field_validator("model")
    @classmethod
    def _from_root(cls, folder: Path) -> Path:
        """What isn't here may be in Baton's own folder: `baton` works from anywhere with the demo model."""
        return ROOT / folder if not folder.exists() and (ROOT / folder).exists() else folder

    @property
    def served_name(self) -> str:
        return self.served_model_name or self.model.resolve().name


class GatewaySettings(ModelSettings):
    """`baton gateway`: HTTP in, tokens out."""

    host: str = Field("127.0.0.1", description="address to listen on; other than loopback needs an API key")
    port: Port = Field(8000, description="HTTP port")
    api_keys: str = Field("", description="comma-separated API keys; empty: none is asked for (loopback only)")
    tls_cert: str = Field("", description="certificate chain (PEM): serve HTTPS instead of HTTP")
    tls_key: str = Field("", description="its key (PEM); empty: in the same file")
    gateway_id: Id = Field("", description="name on the bus; empty: made up")
    tenants: str = Field(
        "", description="TOML file with tenants, their keys and limits (docs/operations.md); read again on SIGHUP"
    )
    admin_key: str = Field(
        "",
        description="key for what tells of all tenants (/metrics, /debug, /console, /admin); empty: an API key is enough there",
    )
    console: bool = Field(True, description="serve the console, a page, at /")
    request_timeout_s: Seconds = Field(600.0, description="deadline of a request that sets none")
    max_connections: Positive = Field(
        4096, description="open HTTP connections at most; further ones are answered with 503"
    )
    max_requests: Positive = Field(1024, description="requests in flight at most")
    max_queued_tokens: Positive = Field(4_000_000, description="prompt tokens waiting for prefill at most")
    window_s: Annotated[float, Field(gt=0, le=60)] = Field(
        1.0,
        description="work given to the workers before the rest waits in the gateway, seconds of their prefill rates",
    )
    reserved: Annotated[float, Field(ge=0, le=0.9)] = Field(
        0.1, description="share of window and queue that only requests of priority above 0 may use"
    )
    max_body_mb: Positive = Field(10, description="largest HTTP body, MiB")
    local_prefill_tokens: Annotated[int, Field(ge=-1)] = Field(
        -1,
        description="uncached prompt up to this many tokens is prefilled on the decode worker; -1: whenever the rates that "
        "workers measure say that its first token comes earlier there",
    )

    ttft_slo_ms: Annotated[float, Field(gt=0)] = Field(
        1000.0, description="goodput: longest time to first token that is good, ms"
    )
    tpot_slo_ms: Annotated[float, Field(gt=0)] = Field(
        50.0, description="goodput: longest mean time of a further token that is good, ms"
    )
    slo_window_s: Seconds = Field(30.0, description="the planner is told how it went over so long")
    trace_share: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0, description="share of the requests without a traceparent of their own that are traced"
    )

    batch_store_mb: Annotated[int, Field(ge=0)] = Field(
        2048, description="Batch API: disk of NATS for files, batches and results, MiB; 0: no Batch API"
    )
    batch_file_mb: Positive = Field(100, description="Batch API: largest input file, MiB")
    batch_lines: Positive = Field(50_000, description="Batch API: lines of a file at most")
    batch_line_kb: Annotated[int, Field(ge=1, le=4096)] = Field(1024, description="Batch API: longest line, KiB")
    batch_concurrency: Positive = Field(16, description="Batch API: lines that this gateway runs at a time")
    batch_window_s: Seconds = Field(86_400.0, description="Batch API: a batch that takes longer expires")
    batch_keep_days: Annotated[float, Field(gt=0, le=3650)] = Field(
        30.0, description="Batch API: files and batches are kept so long; the same for all gateways"
    )

    @property
    def keys(self) -> tuple[str, ...]:
        """The API keys; empty: none is asked for."""
        return tuple(key.strip() for key in self.api_keys.split(",") if key.strip())

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if self.tls_key and not self.tls_cert:
            raise ConfigError("--tls-key is given without --tls-cert: give both, or none for HTTP")
        if self.host not in LOOPBACK and not self.keys and not self.tenants:
            raise ConfigError(
                f"--host {self.host} is not loopback: set {PREFIX}API_KEYS (--api-keys) or --tenants, "
                "or listen on 127.0.0.1; `baton keys new` makes a key"
            )
        return self


class WorkerOptions(ModelSettings):
    """What the workers of one deployment have in common."""

    transport: Literal["auto", "shm", "cuda_ipc", "ucx", "local"] = Field(
        "auto",
        description="how KV moves: shm (CPU) and cuda_ipc (GPU, NVLink) within a host, ucx also between hosts, local not at all; "
        "auto: shm or cuda_ipc",
    )
    transport_host: str = Field("127.0.0.1", description="address that peers reach this worker's ucx listener at")
    device: Device = Field("cpu", description="cpu, cuda or cuda:N")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="weights and KV; auto: float32 on the CPU"
    )
    kv_memory_mb: Annotated[int, Field(ge=0)] = Field(
        0, description="memory of the KV pool, MiB; 0: 256 on the CPU, on a GPU what weights and working memory leave"
    )
    block_size: Literal[8, 16, 32, 64, 128] = Field(16, description="token positions in a block")
    max_model_len: Annotated[int, Field(ge=0)] = Field(0, description="longest sequence; 0: the model's")
    max_batch_tokens: Annotated[int, Field(ge=0)] = Field(
        0, description="token budget of a step; 0: 512 on the CPU, 8192 on a GPU"
    )
    max_sequences: Annotated[int, Field(ge=0)] = Field(
        0, description="sequences in the decode batch at most; 0: 64 on the CPU, 256 on a GPU"
    )
    step_target_ms: Annotated[float, Field(ge=0)] = Field(
        0.0, description="mean step with prompts, ms; 0: 1.77 bare ones, 3.5 if no worker only prefills; none on CPUs"
    )
    step_timeout_s: Annotated[float, Field(ge=0, le=3600)] = Field(
        0.0,
        description="a step that takes longer hangs: the worker ends, its requests go elsewhere; 0: 60 on a GPU, 120 on the CPU",
    )
    max_prefills: Positive = Field(16, description="prompts that a prefill worker holds at most")
    threads: Positive = Field(1, description="CPU threads of a step")
    fake: bool = Field(
        False, description="fake device: real bytes, made-up tokens, virtual step times (tests, benchmarks)"
    )
    fake_step_ms: Annotated[float, Field(ge=0)] = Field(1.0, description="fake device: fixed cost of a step")
    fake_token_us: Annotated[float, Field(ge=0)] = Field(50.0, description="fake device: cost of a prompt token")
    fake_faults: str = Field(
        "",
        description="fake device: what goes wrong with a prompt that begins with a token, as exit:505,hang-decoding:506",
    )

    @property
    def kv_transport(self) -> str:
        """The transport's name, `auto` resolved."""
        if self.transport != "auto":
            return self.transport
        return "shm" if self.device == "cpu" else "cuda_ipc"


class WorkerServiceSettings(WorkerOptions):
    """A worker: `baton prefill`, `baton decode` or, with both roles, `baton worker`."""

    worker_id: Id = Field("", description="name on the bus; empty: made up")
    ready_file: str = Field("", description="file that is there while the worker takes work, for probes; empty: none")


class PlannerOptions(BaseModel):
    """How roles are moved. Loads are shares of what the workers of a role can do."""

    ttft_slo_ms: Annotated[float, Field(gt=0)] = Field(
        1000.0, description="goodput: longest time to first token that is good, ms"
    )
    tpot_slo_ms: Annotated[float, Field(gt=0)] = Field(
        50.0, description="goodput: longest mean time of a further token that is good, ms"
    )
    plan_period_s: Seconds = Field(2.0, description="time between two decisions")
    plan_hold_s: Annotated[float, Field(ge=0)] = Field(10.0, description="a role must be pressed for so long")
    plan_cooldown_s: Annotated[float, Field(ge=0)] = Field(30.0, description="time between two moves")
    plan_reverse_s: Annotated[float, Field(ge=0)] = Field(60.0, description="time between a move and one back")
    plan_prefill_high: Share = Field(0.9, description="prefill is pressed above this load")
    plan_prefill_low: Share = Field(0.6, description="a prefill worker may leave if the others stay below this load")
    plan_decode_high: Share = Field(0.85, description="decode is pressed above this load")
    plan_decode_low: Share = Field(0.6, description="a decode worker may leave if the others stay below this load")
    plan_attainment: Share = Field(0.95, description="share of requests that should get their service levels")
    plan_dry_run: bool = Field(False, description="decide and say so, but move nobody")
    plan_metrics_port: Port = Field(0, description="port of the planner's Prometheus metrics; 0: none")
    plan_metrics_host: str = Field("127.0.0.1", description="address of that port")

    @model_validator(mode="after")
    def _apart(self) -> Self:
        for role in ("prefill", "decode"):
            if getattr(self, f"plan_{role}_low") >= getattr(self, f"plan_{role}_high"):
                raise ConfigError(
                    f"--plan-{role}-low must be below --plan-{role}-high, or roles would go to and fro between two loads"
                )
        return self


class PlannerSettings(NatsOptions, PlannerOptions):
    """`baton planner`: moves workers between prefill and decode by load and service levels."""

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe log lines shown")
    log_format: Literal["text", "json"] = Field("text", description="log lines for people or for machines")
    planner_id: Id = Field(
        "", description="name on the bus; empty: made up. Of several planners the smallest name acts"
    )


class UpSettings(GatewaySettings, WorkerOptions, PlannerOptions):
    """`baton up`: everything in one command; what it doesn't use itself goes to the services."""

    device: Devices = Field(
        "cpu",
        description="cpu; cuda: a GPU for each worker, in order; cuda:N,cuda:M,…: dealt out to the workers in turn",
    )

    nats_url: str = Field("", description="NATS server, with JetStream; empty: one is started")
    redis_url: str = Field("", description="Redis 7.0+ or Valkey server; empty: one is started")
    prefill: Annotated[int, Field(ge=0, le=64)] = Field(1, description="number of prefill workers")
    decode: Annotated[int, Field(ge=1, le=64)] = Field(1, description="number of decode workers")
    planner: bool = Field(False, description="start a planner as well, which moves workers between the roles")
    data_dir: Path = Field(Path(".baton"), description="where logs and server data go")


class ChatSettings(BaseModel):
    """`baton chat`: talk to a gateway in the terminal."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field("http://127.0.0.1:8000", description="the gateway")
    api_key: str = Field("", description="key to send")
    system: str = Field("", description="system message")
    max_tokens: Annotated[int, Field(ge=0)] = Field(0, description="longest answer; 0: what the context has room for")
    temperature: Annotated[float, Field(ge=0, le=2)] = Field(0.7, description="0: always the most likely token")


class BenchSettings(BaseModel):
    """`baton bench`: load for any OpenAI-compatible server, and what its clients saw."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field("http://127.0.0.1:8000", description="the server")
    api_key: str = Field("", description="key to send")
    served_model_name: str = Field("", description="model to ask for; empty: the first that the server lists")
    endpoint: Literal["completions", "chat"] = Field("completions", description="which API")
    dataset_path: str = Field("", description="JSONL or ShareGPT-like JSON with prompts; empty: random ones")
    input_len: Positive = Field(512, description="tokens of a random prompt (chat: words), beside the shared prefix")
    output_len: Positive = Field(128, description="tokens of an answer")
    range_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="random lengths lie within (1 - this) and (1 + this) of the given ones"
    )
    prefix_len: Annotated[int, Field(ge=0)] = Field(0, description="tokens that prompts have in common")
    prefix_share: Annotated[float, Field(ge=0, le=1)] = Field(1.0, description="share of prompts with that prefix")
    vocab_size: Positive = Field(1000, description="random token ids are below this")
    ignore_eos: bool = Field(True, description="answers have their full length")
    request_rate: Annotated[float, Field(ge=0)] = Field(
        0.0, description="requests a second; 0: as many as may be in flight"
    )
    arrivals: Literal["poisson", "constant"] = Field("poisson", description="how requests are spread at that rate")
    max_concurrency: Annotated[int, Field(ge=0)] = Field(0, description="requests in flight at most; 0: any number")
    num_prompts: Positive = Field(100, description="requests in all")
    duration_s: Annotated[float, Field(ge=0)] = Field(0.0, description="stop sending after this; 0: send all")
    num_warmups: Annotated[int, Field(ge=0)] = Field(1, description="requests before, one by one, that do not count")
    timeout_s: Seconds = Field(600.0, description="a request that takes longer is an error")
    seed: int = Field(0, description="the same seed sends the same load")
    ttft_slo_ms: Annotated[float, Field(ge=0)] = Field(0.0, description="goodput: longest time to first token; 0: any")
    tpot_slo_ms: Annotated[float, Field(ge=0)] = Field(0.0, description="goodput: longest mean time per token; 0: any")
    e2e_slo_ms: Annotated[float, Field(ge=0)] = Field(0.0, description="goodput: longest time of a request; 0: any")
    print_each: bool = Field(False, description="print a line for each request that ended")
    json_file: str = Field("", description="write the results there as JSON")


class DoctorSettings(ModelSettings):
    """`baton doctor`: checks this machine and says what to fix."""

    device: Device = Field("cpu", description="cpu, or cuda: check torch and the GPUs as well")
    host: str = Field("127.0.0.1", description="address of the gateway's port")
    port: Port = Field(8000, description="port that must be free; 0: not checked")
    print_json: bool = Field(False, description="print JSON")


class TopSettings(NatsOptions):
    """`baton top`: workers and gateways, live in the terminal."""

    url: str = Field("", description="a gateway whose /metrics to show; empty: none")
    api_key: str = Field("", description="key to send: the admin key where there is one")
    interval_s: Annotated[float, Field(ge=0.1, le=60)] = Field(1.0, description="time between two pictures")
    once: bool = Field(False, description="print one table and end")
    print_json: bool = Field(False, description="print one JSON document and end")


class UsersSettings(BaseModel):
    """`baton users`: make up users and passwords for NATS and Redis."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path = Field(Path("users"), description="where the files go, readable by their owner alone")
    members: str = Field(
        "", description="processes as ROLE:ID by commas, a user for each; a role without any has one user for all"
    )


class TraceSettings(BaseModel):
    """`baton trace [REQUEST]`: where the time of a recent request went."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field("http://127.0.0.1:8000", description="the gateway that served it")
    api_key: str = Field("", description="key to send: the admin key where there is one")
    request: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{0,200}$")] = Field(
        "", description="id of an answer or of one of its choices; empty: list the running, slowest and latest requests"
    )
    print_json: bool = Field(False, description="print what the gateway answers")


S = TypeVar("S", bound=BaseModel)
ALL: tuple[type[BaseModel], ...] = (
    UpSettings,
    GatewaySettings,
    WorkerServiceSettings,
    PlannerSettings,
    ChatSettings,
    BenchSettings,
    DoctorSettings,
    TopSettings,
    UsersSettings,
    TraceSettings,
)


def load_settings(
    kind: type[S], *, command: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> S:
    """Resolve settings from `arguments`, the environment and a file. Raises ConfigError; `--help` prints and exits."""
    environment = os.environ if environment is None else environment
    flags = vars(_parser(kind, command).parse_args(list(arguments)))
    config_file = flags.pop("config") or environment.get(f"{PREFIX}CONFIG")
    values = _from_file(kind, Path(config_file)) if config_file else {}
    values |= _from_environment(kind, environment)
    values |= {name: value for name, value in flags.items() if value is not None}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def as_environment(settings: BaseModel, kind: type[BaseModel]) -> dict[str, str]:
    """The variables that give `kind` the values of `settings`: how `baton up` configures its services."""
    return {
        f"{PREFIX}{name.upper()}": str(getattr(settings, name)) for name in kind.model_fields if hasattr(settings, name)
    }


def flag_of(name: str) -> str:
    """The command line's name of a setting."""
    return FLAGS.get(name, f"--{name.replace('_', '-')}")


def see_one_gpu(index: int, *, count: int) -> None:
    """Hide all GPUs but one from this process, before CUDA is used. `count`: how many it sees now. Raises ConfigError."""
    if index >= count:
        raise ConfigError(f"--device cuda:{index}: this process sees {count} CUDA devices")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)


def fail(error: object) -> int:
    """Print one line for a person; the exit code to leave with."""
    print(f"baton: {error}", file=sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        unknown = message.partition("unrecognized arguments: ")[2].split()
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            raise ConfigError(f"unknown option {unknown[0]}{_nearest(unknown[0], known)}; see {self.prog} --help")
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parser(kind: type[BaseModel], command: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"baton {command}",
        allow_abbrev=False,
        description=(kind.__doc__ or "").strip(),
        epilog=f"Each option is also a variable ({PREFIX}NAME) and a key of the file given by --config (TOML).",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    for name, field in kind.model_fields.items():
        text = f"{field.description} (default: {field.default})".replace("%", "%%")
        flag = flag_of(name)
        if field.annotation is bool:
            parser.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else None
            metavar = "{" + ",".join(map(str, choices)) + "}" if choices else name.rpartition("_")[2].upper()
            parser.add_argument(
                flag, dest=name, metavar=metavar, help=text, type=_number if _is_int_choice(choices) else str
            )
    return parser


def _is_int_choice(choices: tuple[Any, ...] | None) -> bool:
    return bool(choices) and all(isinstance(choice, int) for choice in choices or ())


def _number(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _from_environment(kind: type[BaseModel], environment: Mapping[str, str]) -> dict[str, Any]:
    known = {f"{PREFIX}{name.upper()}" for settings in ALL for name in settings.model_fields} | {f"{PREFIX}CONFIG"}
    for name in environment:
        if name.startswith(PREFIX) and name not in known:
            raise ConfigError(f"unknown variable {name}{_nearest(name, sorted(known))}")
    values: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        raw = environment.get(f"{PREFIX}{name.upper()}")
        if raw is not None:
            choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else None
            values[name] = _number(raw) if _is_int_choice(choices) else raw
    return values


def _from_file(kind: type[BaseModel], path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path}: {error}") from None
    known = sorted({name for settings in ALL for name in settings.model_fields})
    for name in content:
        if name not in known:
            raise ConfigError(f"--config {path}: unknown setting {name!r}{_nearest(name, known)}")
    return {name: value for name, value in content.items() if name in kind.model_fields}


def _explain(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else "?"
    return (
        f"{flag_of(name)} ({PREFIX}{name.upper()}): {first['msg'][0].lower()}{first['msg'][1:]}, not {first['input']!r}"
    )


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""
