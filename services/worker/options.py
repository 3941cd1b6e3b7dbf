"""Options that the workers of one deployment have in common; `baton up` hands them on to each worker."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, cast

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from common.settings import AUTO, ConfigError, Form
from kvtransfer.transports import TRANSPORTS, TransportName, automatic
from services.runtime.settings import ModelSettings
from services.worker.host_share import HostMB
from services.worker.kv_events import KVEventsConfig
from services.worker.speculative import SpeculativeConfig
from worker.tier.settings import DiskSettings

FAKE_DEVICE = r"fake(:\d+(\.\d+)?){0,2}"
Device = Annotated[
    str, Field(pattern=rf"^(cpu|cuda(:\d+)?|{FAKE_DEVICE})$"), Form("cpu, cuda, cuda:N (a GPU's number) or fake")
]


def _a_size(text: str) -> str:
    HostMB.parse(text)
    return text


MOST_RANKS = 64
Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]
STAGES = (
    "stages, a process each, of a range of the model's layers and their KV: passes go through them one behind another; with "
    "--device cuda each has a GPU; beside --tensor-parallel-size each has so many ranks"
)
HostSize = Annotated[str, BeforeValidator(str), AfterValidator(_a_size)]
LISTENING = "|".join(name for name, kind in TRANSPORTS.items() if kind.listens_at)
NO_PULL = ",no-pull"
TransportAt = Annotated[
    str,
    Field(pattern=rf"^(auto|{'|'.join(TRANSPORTS)}|({LISTENING}):[^\s,]+)({NO_PULL})?$"),
    Form(f"auto, {', '.join(TRANSPORTS)} or ucx:HOST, which {NO_PULL} may follow,"),
]


class FakeDevice(NamedTuple):
    """The costs of a fake device: of a step, and of a prompt's token."""

    step_ms: float = 1.0
    token_us: float = 50.0


class WorkerOptions(ModelSettings):
    """Options that the workers of one deployment have in common."""

    transport: TransportAt = Field(
        "auto",
        description="how KV moves: shm (CPU) and cuda_ipc (GPU, NVLink) within a host, ucx also between hosts, as ucx:HOST at "
        "the address of this machine that peers reach (127.0.0.1), local not at all; auto: shm or cuda_ipc; with ,no-pull "
        "behind it workers compute what peers have cached, instead of asking them for it",
    )
    device: Device = Field(
        "cpu",
        description="cpu, cuda or cuda:N; fake, or fake:STEP_MS:TOKEN_US: real bytes, made-up tokens, virtual times (1 ms a "
        "step, 50 µs a prompt token), for tests and benchmarks",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="weights and KV; auto: the checkpoint's, on a CPU float32 unless bfloat16 is the faster one",
    )
    kv_cache_dtype: Literal[
        "auto",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        "int8",
        "int8_per_token_head",
        "int4",
        "int4_per_token_head",
        "float16",
        "float32",
    ] = Field(
        "auto",
        description="what keys and values are kept as: fp8 (e4m3) and int8 (a scale for each head and token) halve 16 bits, "
        "int4 (a scale and a zero point) makes a quarter of them; "
        "float16 and float32 are for models that compute in float32 on a CPU; "
        "auto: fp8 if the checkpoint has scales for it, float16 for 4 and 8 bits in tiles and for pairs of bfloat16 on a CPU,"
        " else as --dtype says",
    )
    kv_cache_dtype_skip_layers: Literal["", "sliding_window"] = Field(
        "", description="layers whose keys and values stay as --dtype says: sliding_window, those with a window"
    )
    disable_hybrid_kv_cache_manager: bool = Field(
        False,
        description="layers with a window keep all positions, in blocks with the others; else they have blocks of their own, "
        "where sequences take less with them, and let go of what no window sees",
    )
    kv_retention: Literal["combined", "lru", "lfu", "ttl"] = Field(
        "combined",
        description="which cached blocks go first: combined (time to live, session, priority, tenant's share and use), "
        "or by one of them: lru, lfu, ttl",
    )
    model_impl: Literal["auto", "baton", "transformers"] = Field(
        "auto",
        description="whose code computes the model: baton's kernels, or the installed transformers over Baton's cache, slowly; "
        "auto: transformers where Baton has no family",
    )
    quantization: Literal["auto", "fp8", "int4", "int8"] = Field(
        "auto",
        description="what plain weights become while they are loaded; auto: they stay as the checkpoint has them; int8: on CPUs",
    )
    kv_memory_mb: Annotated[int, Field(ge=0), AUTO] = Field(
        0,
        description="memory of the KV pool, of each rank, MiB; auto: 256 on the CPU, for one whole context up to 1024 where "
        "a quarter of the free memory is as much; on a GPU what weights and working memory leave",
    )
    kv_host_mb: HostSize = Field(
        "0",
        description="host memory for blocks that the KV pool evicts, MiB, from which prompts get them back, a worker's for "
        "all its ranks; 0: none; auto: half of what is free at the start, shared out by `up`; take twice the pool; MB:shared "
        "or auto:shared: one memory for all workers of this host that serve the model, which find each other's blocks",
    )
    kv_disk: str = Field(
        "",
        description="DIRECTORY:MB, files for what the memory of --kv-host-mb gives up, so many MiB for each worker, kept through "
        "restarts; models may share it, and each removes what the others left a day ago and no process has; empty: none",
    )
    kv_events_config: str = Field(
        "",
        description="which blocks are cached, told to routers over ZeroMQ: JSON in vLLM's form, such as "
        '{"enable_kv_cache_events": true, "topic": "kv@IP:PORT@MODEL", "endpoint": "tcp://*:5557"}; '
        "without an endpoint only this machine hears them; empty: not",
    )
    block_size: Annotated[Literal[0, 8, 16, 32, 64, 128, 256, 512, 1024], AUTO] = Field(
        0, description="token positions in a block; auto: 16, up to 1024 for a model that keeps states"
    )
    enable_expert_parallel: bool = Field(
        True,
        description="each rank has some experts, whole; off: a part of every expert, of which there may be any number",
    )
    max_model_len: Annotated[int, Field(ge=0), AUTO] = Field(
        0, description="longest sequence; auto: the model's, up to 1048576"
    )
    max_batch_tokens: Annotated[int, Field(ge=0), AUTO] = Field(
        0, description="token budget of a step; auto: 512 on the CPU, 8192 on a GPU"
    )
    max_sequences: Annotated[int, Field(ge=0), AUTO] = Field(
        0, description="sequences in the decode batch at most; auto: 64 on the CPU, 256 on a GPU"
    )
    step_target_ms: Annotated[float, Field(ge=0), AUTO] = Field(
        0.0,
        description="mean step with prompts, ms; auto: 1.77 bare ones, 3.5 if nobody only prefills, more by goals; none on CPUs",
    )
    speculative_config: str = Field(
        "",
        description="drafts that a step verifies, never changing a text: suffix or ngram (lookup in prompt and answers), or "
        "mtp (the checkpoint's own layer), with the most tokens (suffix:8), or JSON in vLLM's form (also eagle3, peagle, dflash, "
        "dspark and draft_model, with a folder); empty: none",
    )
    step_timeout_s: Annotated[float, Field(ge=0, le=3600), AUTO] = Field(
        0.0,
        description="a longer step hangs: the worker ends, its requests go elsewhere; auto: 60 on a GPU, 120 on the CPU",
    )
    threads: Annotated[int, Field(ge=0, le=1024), AUTO] = Field(
        0,
        description="CPU threads of a step, of each rank; auto: the physical cores, shared out among ranks, and by `up` among "
        "the workers that are loaded at a time",
    )

    @field_validator("speculative_config")
    @classmethod
    def _is_known(cls, text: str) -> str:
        SpeculativeConfig.parse(text)
        return text

    @field_validator("kv_disk")
    @classmethod
    def _is_below_the_host(cls, text: str, info: ValidationInfo) -> str:
        if DiskSettings.parse(text) is not None and HostMB.parse(info.data.get("kv_host_mb", "auto")).mb == 0:
            raise ValueError("files lie below host memory: give --kv-host-mb, too, not files alone")
        return text

    @field_validator("kv_events_config")
    @classmethod
    def _is_readable(cls, text: str) -> str:
        KVEventsConfig.parse(text)
        return text

    @property
    def fake(self) -> FakeDevice | None:
        """The fake device, if there is one."""
        name, *costs = self.device.split(":")
        return FakeDevice(*map(float, costs)) if name == "fake" else None

    @property
    def processor(self) -> str:
        """The device that has the memory: a fake one has the CPU's."""
        return "cpu" if self.fake else self.device

    @property
    def kv_transport(self) -> TransportName:
        """The transport's name, `auto` resolved."""
        name = self.transport.removesuffix(NO_PULL).partition(":")[0]
        return automatic(self.processor) if name == "auto" else cast(TransportName, name)

    @property
    def transport_host(self) -> str:
        """The address at which peers reach the transport."""
        return self.transport.removesuffix(NO_PULL).partition(":")[2] or "127.0.0.1"

    @property
    def pulls(self) -> bool:
        """True if workers ask each other for cached blocks."""
        return not self.transport.endswith(NO_PULL)

    def check_beside(self, ranks: int, stages: int) -> None:
        """Raise ConfigError for what a worker of so many ranks or stages doesn't have, whatever its model.

        An engine refuses its part of this, too; here it is known before a model is fetched.
        """
        if ranks * stages == 1:
            return
        asked, several = f"--tensor-parallel-size {ranks}", "ranks"
        if stages > 1:
            asked, several = f"--pipeline-parallel-size {stages}", "stages"
        for refused, is_so in (
            (
                f"more than {MOST_RANKS} processes with --tensor-parallel-size {ranks}: fewer",
                ranks * stages > MOST_RANKS,
            ),
            (f"a fake device computes nothing that {several} could share: --device cpu", self.fake is not None),
            (
                "transformers computes a model whole: a model of Baton's families",
                self.model_impl == "transformers",
            ),
        ):
            if is_so:
                raise ConfigError(f"{asked}: {refused}, or take 1")
