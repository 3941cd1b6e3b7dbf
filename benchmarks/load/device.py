"""A device whose passes take what the engine's committed pages say, for models of a worker under load.

A pass reads the weights once, whatever shares it: rows of streams and prompt tokens go through the same products. Streams add
the reading of their contexts, prompts the attention to earlier positions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.load.cells import Device
from engine.engine import Chunk
from engine.step.graphs import MIXED_GRAPHS, PROMPT_GRAPHS, graph_sizes
from engine.step.warm import TIMED_PROMPTS
from worker.device.prompt_budget import PassLoad

RESULTS = Path(__file__).parents[1] / "results"
PAGES: Mapping[Device, str] = {"bf16": "engine.json", "fp8": "engine-kv-fp8-fp8.json"}
KV_BYTES: Mapping[Device, int] = {"bf16": 131_072, "fp8": 65_536}  # one token, all layers
# The pages' passes ran alone on a cool card. With these ratios chat at 20/s (bf16) and 28/s (fp8) is as it was measured.
UNDER_LOAD: Mapping[Device, float] = {"bf16": 1.1, "fp8": 1.4}
LAUNCH_MS = 16.0  # the host's, kernel by kernel; two formats' streams went at that pace (H200, e404cd8e)
READ_BYTES_PER_S = 4.2e12
MEASURED_BATCHES = (1, 8, 32, 64, 128, 256)
MEASURED_CONTEXT = 1088
MEASURED_PROMPTS = (512, 2048, 8192)
TILE_TOKENS = 128
KV_BLOCK, KV_BLOCKS = 16, 58_624
MAX_SEQUENCES, MAX_BATCH_TOKENS = 256, 8192


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Milliseconds of any pass, from measured steps and prompts."""

    step_ms: tuple[float, ...]  # by `MEASURED_BATCHES`, at `MEASURED_CONTEXT`
    fixed_ms: float
    token_ms: float
    pair_ms: float
    kv_bytes: int

    @classmethod
    def of(cls, device: Device) -> PassCosts:
        """Costs from the page of the device."""
        values = {row["name"]: row["value"] for row in json.loads((RESULTS / PAGES[device]).read_text())}
        prompts = np.array(MEASURED_PROMPTS, dtype=float)
        parts = np.stack([np.ones(3), prompts, prompts * prompts / 2], axis=1)
        fixed, token, pair = np.linalg.solve(parts, [values[f"ttft_p{tokens}"] for tokens in MEASURED_PROMPTS]).tolist()
        slower = UNDER_LOAD[device]
        half = (1 + slower) / 2  # a step of streams reads, which heat slows less than products
        steps = tuple(half * values[f"decode_b{batch}_ctx{MEASURED_CONTEXT}"] for batch in MEASURED_BATCHES)
        return cls(steps, max(0.0, fixed), slower * token, slower * max(0.0, pair), KV_BYTES[device])

    def ms(self, load: PassLoad, context: float) -> float:
        """Milliseconds of a pass. `context`: positions before the streams' tokens, of all together."""
        if not load.prompt_tokens:
            return self._rows_ms(load.decoding) + self._read_ms(context)
        rows = load.prompt_tokens + load.decoding
        computed = self.fixed_ms + self.token_ms * math.ceil(rows / TILE_TOKENS) * TILE_TOKENS
        # One that is smaller than this waits for the weights all the same.
        products = max(computed, self._rows_ms(min(rows, MEASURED_BATCHES[-1])))
        if not _is_captured(load):
            products = max(products, LAUNCH_MS)
        return products + self._read_ms(context) + self.pair_ms * load.pairs

    def pass_ms(self) -> dict[tuple[int, int], float]:
        """The times that a worker on this device would measure at its start."""
        timed = {
            (size.decoding, size.prompts): self.ms(PassLoad(size.decoding, size.prompts), 0.0)
            for size in graph_sizes(MAX_SEQUENCES, MAX_BATCH_TOKENS)
            if size.decoding
        }
        return timed | {(0, tokens): self.ms(PassLoad(0, tokens, tokens * tokens / 2), 0.0) for tokens in TIMED_PROMPTS}

    def of_chunks(self, chunks: Iterable[Chunk]) -> float:
        """Milliseconds of a pass of these chunks."""
        chunks = list(chunks)
        context = sum(chunk.start for chunk in chunks if chunk.decodes and chunk.sample)
        return self.ms(PassLoad.of(chunks), context)

    def _rows_ms(self, rows: int) -> float:
        """A step of so many rows without contexts."""
        if not rows:
            return 0.0
        bare = [
            ms - self._read_ms(MEASURED_CONTEXT * batch)
            for batch, ms in zip(MEASURED_BATCHES, self.step_ms, strict=True)
        ]
        return float(np.interp(rows, MEASURED_BATCHES, bare))

    def _read_ms(self, positions: float) -> float:
        return 1000 * positions * self.kv_bytes / READ_BYTES_PER_S


def _is_captured(load: PassLoad) -> bool:
    """True if a graph has room for the pass; prompts alone are taken as one whole one."""
    if not load.decoding:
        return load.prompt_tokens <= PROMPT_GRAPHS[-1]
    slots = next((slots for slots in MIXED_GRAPHS if slots >= load.decoding), 0)
    return bool(slots) and slots + load.prompt_tokens <= MIXED_GRAPHS[slots][-1]
