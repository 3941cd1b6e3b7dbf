# mypy: allow-untyped-calls
"""Records what a forward pass launches: Triton's kernels and the library's operations, in order, with their tensors' shapes.

    TRITON_INTERPRET=1 python -m tests.unit.engine.launches FOLDER...    the launches of every pass below, as JSON
    python -m tests.unit.engine.launches                                 writes the record anew

The passes are laid out as for a GPU, and no kernel runs: what is launched depends on shapes alone. Integers (block tables,
tiles) and attention's scratch are recorded without their shapes: they say how work is cut, not what the model computes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.pages import KVLayout
from engine.config import CacheConfig, EngineConfig
from engine.engine import Chunk, Engine
from engine.step.warm import tables_from
from tests.unit.engine.generate import Generator, new_sequence

ROOT = Path(__file__).resolve().parents[3]
RECORD = Path(__file__).with_name("launches.json")
NUM_BLOCKS = 160
WINDOWS = {"use_sliding_window": True, "sliding_window": 24, "num_hidden_layers": 3}
FULL, SLIDING = "full_attention", "sliding_attention"
# The sizes suit the kernel for few rows; the heads of Qwen3 are together wider than the hidden state.
SIZES = {"hidden_size": 256, "intermediate_size": 512}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases, tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama with scaled rope": ("llama3", {"num_hidden_layers": 1}),
    "mistral": ("mistral", {}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2, later layers with a window": ("qwen2", {**WINDOWS, "max_window_layers": 1, "tie_word_embeddings": False}),
    "qwen2, a window in the middle": ("qwen2", {**WINDOWS, "layer_types": [FULL, SLIDING, FULL]}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "qwen3 with biases, tied": ("qwen3", {**WINDOWS, "layer_types": [SLIDING, FULL, SLIDING], "attention_bias": True}),
}
MODELS["qwen3 with biases, tied"][1]["tie_word_embeddings"] = True
SPLIT = ("_decode", "_combine")  # kernels with scratch in float32
# Each chunk has tokens before it, its own, and whether it samples. Chunks that decode come first.
PASSES: dict[str, list[tuple[int, int, bool]]] = {
    "prompt": [(0, 20, True)],
    "long prompt": [(0, 100, True)],
    "prompt, goes on": [(0, 30, False)],
    "prompts behind cached ones": [(32, 20, True), (16, 70, True)],
    "decode": [(9, 1, True), (30, 1, True), (1, 1, True)],
    "decode, one samples": [(9, 1, False), (30, 1, True)],
    "decode, nobody samples": [(9, 1, False)],
    "decode, many": [(5, 1, True)] * 70,
    "mixed": [(40, 1, True), (0, 9, True), (16, 30, False), (35, 3, True)],
    "mixed, decoding ones sample": [(40, 1, True), (16, 30, False)],
}


class Recorder(TorchDispatchMode):
    """Notes every launch as text: its name, then dtype and shape of each tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not op.is_view and "empty" not in str(op):
            self._note(str(op), [*args, *kwargs.values()])
        return op(*args, **kwargs)

    def kernel(self, kernel: Any, grid: object, variant: object, *arguments: Any, **options: Any) -> None:
        """Takes the place of `Kernel.launch`."""
        self._note(kernel.function.__name__, [*arguments, *options.values()])

    def _note(self, name: str, arguments: list[Any]) -> None:
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        if name in SPLIT:
            tensors = [tensor for tensor in tensors if tensor.dtype is not torch.float32]
        self.launches.append(" ".join([name, *map(_described, tensors)]))


def launches_of(folder: Path) -> dict[str, list[str]]:
    """The launches of every pass, and of those that decode once more as a captured graph has them."""
    from engine.kernels import launch
    from engine.model.decoder import Decoder

    engine = Engine(EngineConfig(model=folder, dtype="float16", cache=CacheConfig(num_blocks=NUM_BLOCKS)))
    forward = Decoder.forward
    found: dict[str, list[str]] = {}

    def recorded(decoder: Decoder, batch: Any, parts: Any, **options: Any) -> torch.Tensor | None:
        with (
            Recorder() as recorder,
            mock.patch.object(launch.Kernel, "launch", lambda *given, **named: recorder.kernel(*given, **named)),
        ):
            logits = forward(decoder, batch, parts, **options)
        found[name] = recorder.launches
        return logits

    def in_a_graph(decoder: Decoder, batch: Any, parts: Any) -> torch.Tensor | None:
        object.__setattr__(batch, "sampled_rows", None)
        logits = torch.empty((batch.num_sampled, engine.vocab_size), dtype=parts[0].dtype)
        return recorded(decoder, batch, parts, logits=logits)

    for name, parts in PASSES.items():
        with mock.patch.object(Decoder, "forward", recorded):
            engine.launch(chunks(parts, engine.layout))
        if all(count == 1 and samples for _, count, samples in parts):
            name += ", in a graph"
            with mock.patch.object(Decoder, "forward", in_a_graph):
                engine.launch(chunks(parts, engine.layout))
    return found


def tokens_of(folder: Path) -> list[list[int]]:
    """Greedy tokens behind prompts of several lengths, whole and in chunks, on the CPU."""
    engine = Engine(EngineConfig(model=folder, cache=CacheConfig(num_blocks=NUM_BLOCKS)))
    prompts = [[(7 * index + length) % 512 for index in range(length)] for length in (1, 17, 40, 70)]
    sequences = [new_sequence(f"r{index}", prompt, max_tokens=16) for index, prompt in enumerate(prompts)]
    whole, parts = sequences[:2], sequences[2:]
    return Generator(engine).run(whole) + Generator(engine, chunk_size=13).run(parts)


def interpreted(folders: Iterable[Path]) -> list[dict[str, list[str]]]:
    """`launches_of` each folder, in a process of its own: Triton's switch holds for a process."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.unit.engine.launches", *map(str, folders)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    launches: list[dict[str, list[str]]] = json.loads(done.stdout)
    return launches


def folders(build_in: Path) -> dict[str, Path]:
    """The demo model and a random one of each kind, written into `build_in`."""
    from tests.models import build_tiny_model

    random = {
        name: build_tiny_model(build_in / str(index), family, **SIZES | changes)
        for index, (name, (family, changes)) in enumerate(MODELS.items())
    }
    return {"demo": ROOT / "demo"} | random


def read_record() -> dict[str, tuple[list[list[int]], dict[str, list[str]]]]:
    """For each model its tokens and its launches by pass."""
    record = json.loads(RECORD.read_bytes())
    kinds = record["launches"]
    return {
        name: (model["tokens"], {each: [kinds[index] for index in row] for each, row in model["passes"].items()})
        for name, model in record["models"].items()
    }


def write_record(models: dict[str, Path]) -> None:
    """Write the record of these models, each launch's text once."""
    kinds: dict[str, int] = {}
    record = {}
    for (name, folder), found in zip(models.items(), interpreted(models.values()), strict=True):
        passes = {each: [kinds.setdefault(launch, len(kinds)) for launch in row] for each, row in found.items()}
        record[name] = {"tokens": tokens_of(folder), "passes": passes}
    lines = [f"{json.dumps('launches')}: {json.dumps(list(kinds), indent=0)}", f'"models": {_lines(record)}']
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def chunks(parts: list[tuple[int, int, bool]], layout: KVLayout) -> list[Chunk]:
    """All have the same entries of further groups: what is there does not matter."""
    first_block, chunks = 0, []
    for start, count, samples in parts:
        sequence = new_sequence("a", [(7 * index + start) % 500 for index in range(start + count + (not samples))])
        num_entries = -(-(start + count) // layout.block_size)
        own, shared = tables_from(layout, first_block, num_entries), tables_from(layout, -num_entries, num_entries)
        sequence.tables, first_block = [own[0], *shared[1:]], first_block + num_entries
        chunks.append(Chunk(sequence, start, count, samples))
    return chunks


def _described(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)}".replace(" ", "") if tensor.is_floating_point() else dtype


def _lines(record: dict[str, Any]) -> str:
    """JSON with a line for each pass."""
    models = []
    for name, model in record.items():
        passes = ",\n".join(f"  {json.dumps(each)}: {json.dumps(row)}" for each, row in model["passes"].items())
        models.append(f' {json.dumps(name)}: {{"tokens": {json.dumps(model["tokens"])}, "passes": {{\n{passes}}}}}')
    return "{\n" + ",\n".join(models) + "}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps([launches_of(Path(folder)) for folder in sys.argv[1:]]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            write_record(folders(Path(folder)))
