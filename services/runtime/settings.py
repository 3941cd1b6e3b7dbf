"""Settings that several processes and tools share, and their conversion for connections."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from common.settings import ROOT, ConfigError, Form, Options, Seconds
from common.tls import Tls
from modelfiles.files import found, name_of
from modelfiles.gguf import GgufError, is_gguf
from services.runtime.hub import NAMED, cached, is_id, is_kept, kept, parsed, whole

# Imported on use: help waits for no client and no gateway.
if TYPE_CHECKING:
    from common.bus import NatsSettings
    from common.store import RedisSettings


class NatsOptions(Options):
    """Connection settings of NATS."""

    nats_url: str = Field("nats://127.0.0.1:4222", description="NATS server, with JetStream; tls:// encrypts")
    nats_credentials: str = Field("", description="file with user:password for NATS")
    servers_ca: str = Field(
        "", description="who signs the certificates of NATS and Redis (PEM); empty: the system's authorities"
    )
    servers_cert: str = Field("", description="certificate of this process for NATS and Redis (PEM)")
    servers_key: str = Field("", description="its key (PEM)")

    def nats(self) -> NatsSettings:
        """Address, user and certificates of NATS."""
        from common.bus import NatsSettings

        return NatsSettings(
            url=self.nats_url,
            credentials=_file(self.nats_credentials),
            tls=self._tls(),
        )

    def _tls(self) -> Tls:
        return Tls(ca=_file(self.servers_ca), cert=_file(self.servers_cert), key=_file(self.servers_key))


class LogOptions(Options):
    """Settings of a process's log and traces."""

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe log lines shown")
    log_format: Literal["text", "json"] = Field("text", description="log lines for people or for machines")


class HostOptions(NatsOptions, LogOptions):
    """Settings that `baton up` passes to its host."""


class ServiceLevelOptions(Options):
    """The objectives of a good answer, for goodput and for the planner."""

    ttft_slo_ms: Annotated[float, Field(gt=0)] = Field(
        1000.0, description="goodput: longest time to first token that is good, ms"
    )
    tpot_slo_ms: Annotated[float, Field(gt=0)] = Field(
        50.0, description="goodput: longest mean time of a further token that is good, ms"
    )


class Settings(NatsOptions, LogOptions):
    """Settings of every service."""

    redis_url: str = Field("redis://127.0.0.1:6379", description="Redis 7.0+ or Valkey server; rediss:// encrypts")
    redis_credentials: str = Field("", description="file with user:password for Redis")
    drain_s: Seconds = Field(30.0, description="longest wait for running requests when told to stop")
    otlp_endpoint: Annotated[
        str, Field(pattern=r"^(https?://[^\s/]+(/\S*)?)?$"), Form("an address like http://127.0.0.1:4318")
    ] = Field("", description="OpenTelemetry collector for traces, e.g. http://127.0.0.1:4318; empty: no traces")
    trace_rest_share: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0, description="share of the traces that is sent of requests that were neither slow nor failed nor moved"
    )

    def redis(self) -> RedisSettings:
        """Address, user and certificates of Redis."""
        from common.store import RedisSettings

        return RedisSettings(
            url=self.redis_url,
            credentials=_file(self.redis_credentials),
            tls=self._tls(),
        )


class ModelSettings(Settings):
    """Settings of services that know the model."""

    model: Path = Field(
        Path("demo"),
        validate_default=True,
        description="Hugging Face model folder, GGUF file, or a name, which is fetched once: org/name[@revision][:file-or-quant] "
        "from a hub, or smollm2, a small real one",
    )
    served_model_name: str = Field("", description="name in the API; empty: the folder's or file's name, or the id")

    @model_validator(mode="before")
    @classmethod
    def _called_by_its_id(cls, values: Any) -> Any:
        """A hub model's default name: its id, not its snapshot's hash."""
        name = str(values.get("model", "")) if isinstance(values, dict) else ""
        if _is_by_name(name) and not values.get("served_model_name"):
            return values | {"served_model_name": name}
        return values

    @field_validator("model")
    @classmethod
    def _found(cls, folder: Path) -> Path:
        return from_root(folder)

    @property
    def served_name(self) -> str:
        return self.served_model_name or name_of(self.model)


def default_name(model: str) -> str:
    """The name in the API of a model that is given none: its folder's or file's, or its id. Raises ConfigError."""
    return model if _is_by_name(model) else name_of(from_root(Path(model)))


def _is_by_name(model: str) -> bool:
    """True for a hub's model and one of a package, unless it is a path; a GGUF file that is named has a name of its own."""
    is_known = model in NAMED or ((named := parsed(model)) is not None and not named.kind)
    return is_known and not Path(model).exists() and not (ROOT / model).exists()


def from_root(folder: Path) -> Path:
    """The path itself, else in Baton's own folder (the demo model works from anywhere), or in the hub's cache.

    `…:Q4_K_M` is the GGUF file of that kind. What is not here stays a name. Raises ConfigError.
    """
    name, _, kind = str(folder).rpartition(":")
    here = next((place for place in (folder, ROOT / folder) if place.exists()), None)
    try:
        if here is not None:
            return found(here)
        if name and (inside := next((place for place in (Path(name), ROOT / name) if place.is_dir()), None)):
            return found(inside, kind)
        if is_kept(str(folder)):
            return kept(str(folder)) or folder
        if (named := parsed(str(folder))) is None:
            return folder
        return whole(named) or (None if named.kind else cached(str(named))) or folder
    except GgufError as error:
        raise ConfigError(f"--model {error}") from None


def no_model(folder: Path) -> str:
    """Return the message for a missing model."""
    if str(folder) in NAMED:
        return f"--model {folder}: not here yet: `baton up --model {folder}` fetches it, once"
    if is_id(str(folder)):
        return f"--model {folder}: no folder, and not in the hub's cache: `baton pull {folder}` fetches it"
    if is_gguf(folder):
        return f"--model {folder}: there is no such file"
    return f"--model {folder}: no config.json there; give a Hugging Face model folder, or a GGUF file"


def _file(name: str) -> Path | None:
    return Path(name) if name else None
