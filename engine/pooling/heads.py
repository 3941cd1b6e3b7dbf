"""From tokens' vectors to answers, in float32: pooling, products behind it, lengths of 1; scores of labels.

T tokens of all texts, E hidden size, B texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import gelu, linear, normalize, relu, silu

from engine.kernels.texts.pooling import pool_texts
from engine.pooling.encoder import Encoder
from engine.pooling.products import ACTS
from engine.pooling.sending import sent
from engine.pooling.spec import ClassifierSpec, EncoderSpec
from engine.weights.loader import load_weights, most_elements
from engine.weights.parameters import Parameter, Part, Weights, whole
from modelfiles.late import COLBERT_HEAD, SPARSE_HEAD, TokenHeads
from modelfiles.pooling import DenseLayer, Pooling
from modelfiles.torchfile import read_torch_file

_LAYERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": relu,
    "GELU": gelu,
    "SiLU": silu,
    "Sigmoid": torch.sigmoid,
}


@dataclass(frozen=True, slots=True)
class Spans:
    """The rows of each text in a pass, without its first `skipped`."""

    begins: tuple[int, ...]
    lengths: tuple[int, ...]
    skipped: tuple[int, ...]
    # [5, B] int32, on the pass's device: these three, each text's first row though it is skipped, and its last one.
    numbers: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], skipped: Sequence[int], device: torch.device) -> Spans:
        """`skipped` of a text leave one row at least."""
        skips = tuple(min(skip, length - 1) for length, skip in zip(lengths, skipped, strict=True))
        firsts = accumulate(lengths[:-1], initial=0)
        begins = tuple(first + skip for first, skip in zip(firsts, skips, strict=True))
        rows = tuple(length - skip for length, skip in zip(lengths, skips, strict=True))
        numbers = np.array((begins, rows, skips, begins, begins), dtype=np.int32)
        numbers[3] -= numbers[2]
        numbers[4] += numbers[1] - 1
        return cls(begins, rows, skips, sent(torch.from_numpy(numbers), device))


def pooled(x: torch.Tensor, spans: Spans, mode: str) -> torch.Tensor:
    """Return [B, E] float32 for `x` [T, E]; see `modelfiles.pooling.MODES`.

    As in sentence-transformers, "cls" is a text's first row though it is skipped, and a weight is a row's number in its text.
    """
    if mode in ("cls", "lasttoken"):
        return x[spans.numbers[3 if mode == "cls" else 4]].float()
    return pool_texts(x, spans.numbers[:3], mode)


class VectorHead:
    """A text's vector, or one for each of its tokens."""

    def __init__(self, pooling: Pooling, folder: Path, weights: Weights) -> None:
        """`weights`: the encoder's, not yet loaded. Raises CheckpointError, TorchFileError, OSError."""
        self._pooling = pooling
        self._dense = [(_LAYERS[each.activation], *_dense(each, folder, weights)) for each in pooling.dense]
        heads = pooling.heads
        self._tokens = _head(folder / COLBERT_HEAD, weights.device) if heads is not None and heads.size else None
        self._weighs = _weighing(heads, folder, weights) if heads is not None and heads.weighs else None

    def vectors(self, x: torch.Tensor, spans: Spans) -> torch.Tensor:
        """Return [B, size] for tokens' [T, E]."""
        found = [pooled(x, spans, mode) for mode in self._pooling.modes]
        return self._finished(found[0] if len(found) == 1 else torch.cat(found, dim=-1))

    def each(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, E or what products make of it]: the same without pooling, or what a head of tokens makes."""
        if self._tokens is not None:
            return linear(x.float(), *self._tokens)
        return self._finished(x.float()) if len(self._pooling.modes) <= 1 else x.float()

    def weights(self, x: torch.Tensor, *, is_raw: bool) -> torch.Tensor:
        """Return each token's weight [T, 1], at least 0 unless it `is_raw`."""
        assert self._weighs is not None
        found = linear(x.float(), *self._weighs)
        return found if is_raw else relu(found)

    def _finished(self, found: torch.Tensor) -> torch.Tensor:
        for act, weight, bias in self._dense:
            found = act(linear(found, weight, bias))
        return found


def cut(vectors: torch.Tensor, dimensions: int, *, normalizes: bool) -> torch.Tensor:
    """The first features of each vector, of length 1 again."""
    shorter = vectors[:, :dimensions] if dimensions else vectors
    return normalize(shorter, dim=-1) if normalizes else shorter


def _dense(spec: DenseLayer, folder: Path, encoder: Weights) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not spec.folder:
        part = Part(name="linear.weight", rows=slice(0, spec.outputs))
        shape = (spec.outputs, spec.inputs)
        return encoder.new(Parameter(shape=shape, parts=(part,), format=torch.float32)), None
    weights = Weights(torch.float32, encoder.device, most_elements=most_elements(folder / spec.folder))
    weight = weights.new(whole("linear.weight", spec.outputs, spec.inputs))
    bias = weights.new(whole("linear.bias", spec.outputs)) if spec.has_bias else None
    load_weights(weights, folder / spec.folder)
    return weight, bias


def _weighing(heads: TokenHeads, folder: Path, encoder: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight [1, E] and bias [1] of the head of tokens' weights, in float32."""
    if not heads.stored:
        return _head(folder / SPARSE_HEAD, encoder.device)
    wanted = whole(f"{heads.stored}.weight", 1, heads.inputs), whole(f"{heads.stored}.bias", 1)
    weight, bias = (encoder.new(replace(one, format=torch.float32)) for one in wanted)
    return weight, bias


_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _head(file: Path, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias, in float32."""
    found = read_torch_file(file)
    weight, bias = (
        torch.frombuffer(bytearray(one.values), dtype=_DTYPES[one.dtype]).view(one.shape).to(device, torch.float32)
        for one in (found["weight"], found["bias"])
    )
    return weight, bias


class _Words:
    """A word's logit, or what it has more than another's: one row instead of a vocabulary's."""

    def __init__(self, spec: ClassifierSpec, model: Encoder) -> None:
        self._words = spec.words
        self._tied = model.tokens_table if spec.output == model.spec.tokens.words else None
        self._own = None if self._tied is not None else model.weights.new(_rows(spec, model.spec))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [N, 1] float32."""
        rows = self._own if self._tied is None else self._tied[list(self._words)]
        assert rows is not None
        good, *bad = rows.float()
        return (x.float() @ (good - bad[0] if bad else good))[:, None]


def _rows(spec: ClassifierSpec, model: EncoderSpec) -> Parameter:
    """The words' rows of the head, in float32."""
    name, size = f"{spec.output}.weight", model.tokens.vocab_size
    parts = tuple(
        Part(name=name, rows=slice(at, at + 1), stored=slice(word, word + 1), of=size)
        for at, word in enumerate(spec.words)
    )
    return Parameter(shape=(len(parts), model.hidden_size), parts=parts, format=torch.float32)


class LabelHead:
    """A score for each label."""

    def __init__(self, spec: ClassifierSpec, model: Encoder, activation: str) -> None:
        hidden = model.spec.hidden_size
        self._spec, self._activation = spec, activation
        self._act = ACTS[spec.activation]
        self._dense = (
            model.linear("", (spec.dense,), hidden, (hidden,), bias=spec.has_dense_bias) if spec.dense else None
        )
        self._norm = model.norm(spec.norm)
        if spec.words:
            self._output: Callable[[torch.Tensor], torch.Tensor] = _Words(spec, model)
        else:
            self._output = model.linear("", (spec.output,), hidden, (spec.num_labels,), bias=spec.has_bias)

    def scores(self, x: torch.Tensor, spans: Spans) -> torch.Tensor:
        """Return [B, labels] float32, without the activation."""
        return self.each(pooled(x, spans, self._spec.pools).to(x.dtype))

    def each(self, x: torch.Tensor) -> torch.Tensor:
        """Return [N, labels] float32 for any tokens' [N, E], without the activation."""
        found = x
        if self._dense is not None:
            found = self._act(self._dense(found))
        found = found if self._norm is None else self._norm(found)
        return self._output(found).float()

    def activated(self, scores: torch.Tensor) -> torch.Tensor:
        if self._activation == "softmax":
            return scores.softmax(dim=-1)
        return scores.sigmoid() if self._activation == "sigmoid" else scores
