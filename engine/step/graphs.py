"""Captured passes: a pass that fits into a CUDA graph is replayed, in one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import torch

from engine.batch.layout import MAX_GRAPH_PROMPTS, GraphSize, PassSize
from engine.sequence import Chunk
from engine.step.limits import Limits

# Tokens: longer prompts keep the GPU busy for longer than the host takes to launch them, as a rule.
PROMPT_GRAPHS = (16, 32, 64, 96, 128, 192, 256, 320, 384, 512)
# Tokens of graphs for models whose many small kernels the host launches for longer, see `warm.worth_capturing`.
LONG_PROMPT_GRAPHS = (640, 768, 1024, 1280, 1536, 2048)
# Tokens in all by slots for decoding tokens: whole GEMM tiles. Larger passes beside streams wait for the host's launches.
MIXED_GRAPHS = dict.fromkeys((16, 32, 64, 128), (128, 192, 256, 320, 384, 512)) | {256: (384, 512, 640)}

MEASURED_PASSES = 3


class Captures:
    """The memory that all captured graphs of a device share: what one computes lasts until the next is replayed."""

    def __init__(self) -> None:
        self._first: torch.cuda.CUDAGraph | None = None

    def capture(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Capture what `run` launches. The largest graph goes first: its memory is reused by all others."""
        graph = torch.cuda.CUDAGraph()
        pool = None if self._first is None else self._first.pool()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            run()
        self._first = graph if self._first is None else self._first
        return graph


class Graphs:
    """The CUDA graphs of one decoder's passes. All write their logits, or a stage's rows, to the same buffer."""

    def __init__(self, limits: Limits) -> None:
        self.sizes: list[GraphSize] = []  # the cheapest first
        self.captures = Captures()
        self._limits = limits
        self._graphs: dict[GraphSize, torch.cuda.CUDAGraph] = {}
        self._results: torch.Tensor | None = None  # [largest graph, V]; of a stage that isn't the last [.., E]

    def choose(self, chunks: SequenceOf[Chunk]) -> GraphSize | None:
        """The smallest graph that fits these chunks, decoding ones first; None if there is none."""
        if not self.sizes:
            return None
        decoding = [chunk for chunk in chunks if chunk.decodes]
        prompts = chunks[len(decoding) :]
        if not all(chunk.sample for chunk in decoding) or not self._hold(prompts):
            return None
        rows, tokens = (sum(chunk.num_tokens for chunk in some) for some in (decoding, prompts))
        is_whole = len(prompts) == 1 and not prompts[0].start
        for size in self.sizes:
            has_room = size.decoding >= rows and size.prompts >= tokens
            if has_room and bool(size.prompts) == bool(prompts) and (size.decoding or is_whole):
                return size
        return None

    def _hold(self, prompts: SequenceOf[Chunk]) -> bool:
        """True if graphs have room for so many prompts, for their contexts' blocks and for their logits."""
        num_blocks = sum(-(-chunk.end // self._limits.block_size) for chunk in prompts)
        has_room = len(prompts) <= MAX_GRAPH_PROMPTS and num_blocks <= self._limits.graph_blocks
        return has_room and not any(chunk.scored for chunk in prompts)

    def capture(self, size: GraphSize, forward: Callable[[torch.Tensor | None], torch.Tensor | None]) -> None:
        """Capture `forward(into)`; see `Captures`."""
        results = forward(None)  # the first pass of a kind does more than launch
        assert results is not None
        if self._results is None:
            self._results = torch.empty_like(results)
        into = self._results[: len(results)]
        self._graphs[size] = self.captures.capture(lambda: forward(into))
        self.sizes = sorted(self._graphs, key=lambda size: (size.tokens, size.decoding))

    def replay(self, size: GraphSize) -> torch.Tensor:
        """Launch the graph; return its logits or rows, which the next replay overwrites."""
        self._graphs[size].replay()
        assert self._results is not None
        return self._results

    def measure(self, size: GraphSize) -> float:
        """Time a replay with the present inputs, in milliseconds."""
        return replay_ms(self._graphs[size])


def results_of(size: GraphSize) -> tuple[int, int]:
    """The rows of a captured pass's results, and further ones that it has memory for."""
    return size.num_sampled, size.tokens


def logits_of(results: torch.Tensor | None, size: PassSize) -> torch.Tensor | None:
    """The logits [R, V] among a pass's results, which have more rows where it was captured."""
    return results[: size.num_sampled] if results is not None and size.num_sampled else None


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    """Time a replay with the present inputs, in milliseconds."""
    began, over = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    began.record()
    for _ in range(MEASURED_PASSES):
        graph.replay()
    over.record()
    over.synchronize()
    return began.elapsed_time(over) / MEASURED_PASSES


def graph_sizes(max_sequences: int, longest: int) -> list[GraphSize]:
    """Return the sizes that may be captured: decoding alone, prompts of at most `longest` tokens alone, and both together.

    Decoding sizes are 1, 2, 4, then go in steps of 8 up to 64, 16 up to 256, 32 beyond, until `max_sequences` fit.
    """
    sizes = [1, 2, 4]
    while sizes[-1] < max_sequences:
        size = sizes[-1]
        sizes.append(size + (4 if size < 8 else 8 if size < 64 else 16 if size < 256 else 32))
    mixed = [
        GraphSize(some, total - some)
        for some, totals in MIXED_GRAPHS.items()
        for total in totals
        if some < min(total, 2 * max_sequences)
    ]
    alone = [GraphSize(0, tokens) for tokens in (*PROMPT_GRAPHS, *LONG_PROMPT_GRAPHS)]
    return [GraphSize(size) for size in sizes] + [size for size in mixed + alone if size.prompts <= longest]
