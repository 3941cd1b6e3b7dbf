"""Settings of a worker, and their conversion for its engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from common.settings import ConfigError, Id
from engine.config import CacheConfig, DraftConfig, EngineConfig
from services.rank.cores import physical_cores
from services.worker.nodes import Nodes, check_nodes
from services.worker.options import STAGES, Ranks, WorkerOptions
from services.worker.speculative import SpeculativeConfig


def _some_nodes(text: str) -> str:
    Nodes.parse(text)
    return text


class WorkerServiceSettings(WorkerOptions):
    """A worker: `baton prefill`, `baton decode` or, with both roles, `baton worker`."""

    worker_id: Id = Field("", description="name on the bus; empty: made up")
    tensor_parallel_size: Ranks = Field(
        1,
        description="ranks, a process each, that share a worker's model and its KV: heads, intermediate sizes, experts and "
        "vocabulary; with --device cuda each has a GPU",
    )
    pipeline_parallel_size: Ranks = Field(1, description=STAGES)
    nnodes: Annotated[str, AfterValidator(_some_nodes)] = Field(
        "",
        description="stages on several hosts, as N:RANK@HOST:PORT: N nodes, this one is RANK (from 0), and node 0 listens at "
        "HOST:PORT (29501); the same command on each, with the same --nats-credentials, which show who may join; empty: one host",
    )
    ready_file: str = Field("", description="file that is there while the worker takes work, for probes; empty: none")

    def sized(self) -> WorkerServiceSettings:
        """Fill in the sizes that depend on the device."""
        on_cpu = self.processor == "cpu"
        return self.model_copy(
            update={
                "max_batch_tokens": self.max_batch_tokens or (512 if on_cpu else 8192),
                "max_sequences": self.max_sequences or (64 if on_cpu else 256),
                "threads": self.threads or (self._cores_of_a_rank() if on_cpu else 1),
                "step_timeout_s": self.step_timeout_s or (120.0 if on_cpu else 60.0),
            }
        )

    def engine(self) -> EngineConfig:
        """The engine's configuration. Needs known sizes: see `sized`."""
        return EngineConfig(
            model=self.model,
            draft=self._draft(),
            device=self.processor,
            dtype=self.dtype,
            max_model_len=self.max_model_len or None,
            max_batch_tokens=self.max_batch_tokens,
            max_sequences=self.max_sequences,
            num_threads=self.threads or (self._cores_of_a_rank() if self.processor == "cpu" else 1),
            model_impl=self.model_impl,
            quantization=self.quantization,
            tensor_parallel_size=self.tensor_parallel_size,
            enable_expert_parallel=self.enable_expert_parallel,
            cache=CacheConfig(
                kv_cache_dtype=self.kv_cache_dtype,
                kv_cache_dtype_skip_layers=self.kv_cache_dtype_skip_layers,
                disable_hybrid_kv_cache_manager=self.disable_hybrid_kv_cache_manager,
                kv_memory_bytes=self.kv_memory_mb << 20 or None,
                block_size=self.block_size or None,
            ),
        )

    @property
    def processes(self) -> int:
        """The ranks of all stages of this worker."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def nodes(self) -> Nodes | None:
        """The hosts of its stages; None: this one."""
        return Nodes.parse(self.nnodes)

    @property
    def processes_here(self) -> int:
        """Those of them that are on this host."""
        return self.processes if (nodes := self.nodes) is None else self.processes // nodes.count

    def check_ranks(self) -> None:
        """Raise ConfigError for settings that ranks or stages don't have, whatever the model: before it is fetched."""
        self.check_beside(self.tensor_parallel_size, self.pipeline_parallel_size)
        if (nodes := self.nodes) is not None:
            check_nodes(self, nodes)

    def check_alone(self) -> None:
        """Raise ConfigError for ranks and stages, which a worker that pools doesn't have."""
        for flag, count in (
            ("--tensor-parallel-size", self.tensor_parallel_size),
            ("--pipeline-parallel-size", self.pipeline_parallel_size),
        ):
            if count > 1:
                raise ConfigError(f"{flag} {count}: a worker that pools is one process: take 1, and more workers")
        if self.nnodes:
            raise ConfigError(f"--nnodes {self.nnodes}: a worker that pools is one process: leave it out")

    def _cores_of_a_rank(self) -> int:
        return max(1, physical_cores() // self.processes_here)

    @property
    def drafter(self) -> Path | None:
        """The folder of a draft head's or model's weights; None: nothing drafts, or by lookup."""
        draft = self._draft()
        return draft.folder if draft is not None else None

    def _draft(self) -> DraftConfig | None:
        """The drafts that the engine verifies; None without any."""
        drafts = SpeculativeConfig.parse(self.speculative_config)
        if drafts is None:
            return None
        return DraftConfig(folder=drafts.draft_of(self.model), is_model=drafts.is_model, num_drafts=drafts.most)
