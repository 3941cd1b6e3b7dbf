"""Random models of published shapes on one device: tokens a second beside the rate of its products, and one text's time."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.engine.ceilings import measure_ceilings
from benchmarks.results_format import Result
from engine.pooling.engine import PoolingConfig, PoolingEngine, PoolingInput

TARGET = 0.6  # of the rate of products, for an encoder of 512 tokens
RUNS = 15


@dataclass(frozen=True, slots=True)
class Shape:
    """A published model's sizes, by the fields of its configuration."""

    name: str
    kind: str  # transformers' class
    fields: Mapping[str, int]
    target: float | None

    def flops(self, length: int) -> float:
        """Operations for a token of a text of so many: two a weight, and attention, of half of the keys where it is causal."""
        sizes = self.fields
        hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
        heads, is_decoder = sizes["num_attention_heads"], "num_key_value_heads" in sizes
        width = heads * sizes.get("head_dim", hidden // heads)
        kv_width = width * sizes.get("num_key_value_heads", heads) // heads
        weights = hidden * (2 * width + 2 * kv_width) + (2 + is_decoder) * hidden * inner
        return float(sizes["num_hidden_layers"] * (2 * weights + 4 * width * length / (1 + is_decoder)))


def _tiny(shape: Shape) -> Shape:
    small = {name: 4 if "heads" in name or "layers" in name else 64 for name in shape.fields} | {"vocab_size": 1024}
    if "head_dim" in shape.fields:
        small["head_dim"] = 16
    return Shape(shape.name, shape.kind, small | {"max_position_embeddings": 512}, shape.target)


SHAPES = (
    Shape(
        "bge-base",
        "Bert",
        {
            "vocab_size": 30522, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
            "num_attention_heads": 12, "max_position_embeddings": 512,
        },
        TARGET,
    ),
    Shape(
        "qwen3-embedding-0.6b",
        "Qwen3",
        {
            "vocab_size": 151669, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 32768,
        },
        None,
    ),
)  # fmt: skip


def figures(device: torch.device, *, quick: bool) -> Iterator[Result]:
    """Yield what each shape does with 32 texts of 512 tokens, with mixed lengths, and with one text."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rate = measure_ceilings(device, dtype, quick=quick or device.type == "cpu").flops_per_s
    yield Result(name="products", value=rate / 1e12, unit="TFLOP/s", better="higher")
    for shape in map(_tiny, SHAPES) if quick else SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), shape, dtype)
            named = str(dtype).removeprefix("torch.")
            engine = PoolingEngine(
                PoolingConfig(model=Path(folder), device=str(device), dtype=named, num_threads=2, prefix_bytes=0)
            )
        yield from _of(engine, shape, rate, 2 if quick else 32, 3 if quick else RUNS)


def _of(engine: PoolingEngine, shape: Shape, rate: float, number: int, runs: int) -> Iterator[Result]:
    seconds = _median(engine, [512] * number, runs)
    limit = rate / shape.flops(512)
    tokens = 512 * number / seconds
    target = None if shape.target is None else shape.target * limit
    yield Result(
        name=f"{shape.name}: {number} x 512", value=tokens, unit="tokens/s", better="higher", target=target, floor=limit
    )
    name = f"{shape.name}: {number} x 512, share of the products' rate"
    yield Result(name=name, value=tokens / limit, unit="share", better="higher")
    mixed = [16 + 496 * at // number for at in range(number)]
    tokens = sum(mixed) / _median(engine, mixed, runs)
    yield Result(name=f"{shape.name}: {number} of 16 to 512", value=tokens, unit="tokens/s", better="higher")
    for length in (32, 512):
        seconds = _median(engine, [length], runs)
        yield Result(name=f"{shape.name}: 1 x {length}", value=1000 * seconds, unit="ms", better="lower")


def _median(engine: PoolingEngine, lengths: list[int], runs: int) -> float:
    """Seconds of a pass over texts of these lengths, from tokens to vectors on the host."""
    inputs = [
        PoolingInput(tokens=[(7 * at + 13 * text) % 1000 + 6 for at in range(length)])
        for text, length in enumerate(lengths)
    ]
    times = list[float]()
    for _ in range(runs + 2):
        began = time.perf_counter()
        engine.compute(inputs)
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def write(folder: Path, shape: Shape, dtype: torch.dtype) -> None:
    """Random weights, and sentence-transformers' files for vectors."""
    config: Any = getattr(transformers, f"{shape.kind}Config")(**shape.fields)
    getattr(transformers, f"{shape.kind}Model")(config).to(dtype).save_pretrained(folder)
    is_decoder = "num_key_value_heads" in shape.fields
    pooling = {
        "word_embedding_dimension": shape.fields["hidden_size"],
        "pooling_mode_mean_tokens": False,
        "pooling_mode_cls_token": not is_decoder,
        "pooling_mode_lasttoken": is_decoder,
    }
    (folder / "1_Pooling").mkdir()
    for name, content in (("modules.json", _MODULES), ("1_Pooling/config.json", pooling)):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


_MODULES = [
    {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
    for at, (path, kind) in enumerate((("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")))
]
