"""An engine of whole texts: inputs in, vectors or scores out, one pass at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

import torch

from engine.checkpoint.fingerprint import model_fingerprint
from engine.families.quantised import ONLINE
from engine.pooling.encoder import Encoder
from engine.pooling.families import read_encoder_spec
from engine.pooling.graphs import Passes, sizes_of
from engine.pooling.heads import LabelHead, Spans, VectorHead, cut
from engine.pooling.late import lexical, maxsim, seen_of, with_vectors, with_weights
from engine.pooling.prefixes import Beginning, Prefixes, Sharing, can_share
from engine.pooling.spec import EncoderSpec
from engine.pooling.texts import Texts
from engine.resolving import resolve_dtype, resolve_max_model_len
from engine.spec.model import UnsupportedModelError
from engine.weights.loader import load_weights, most_elements
from engine.weights.parameters import Weights
from modelfiles.pooling import CLASSIFY_TOKENS, EMBED, LEXICAL, MAXSIM, PREFIX_BYTES, TOKENS, Pooling, read_pooling


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """The operator's choices; see `EngineConfig`."""

    model: Path
    device: str = "cpu"
    dtype: str = "auto"
    quantization: str = "auto"
    max_model_len: int | None = None
    num_threads: int = 1
    prefix_bytes: int | None = None  # memory for prefixes of a decoder; None: by the device
    captures: bool = True  # passes of few tokens as CUDA graphs, on a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingInput:
    """One input, and what is asked of it; see `common.messages.Pool`."""

    tokens: Sequence[int]
    work: str = EMBED
    second: int = 0
    skipped: int = 0
    dimensions: int = 0
    is_raw: bool = False
    adapter: str = ""  # one of `Pooling.tasks`; "": none
    salt: str = ""  # inputs with different ones share no prefixes


_Found = tuple[torch.Tensor, int]  # an input's rows, and its tokens that others had computed


class PoolingEngine:
    """Loads a model on construction. Raises ValueError, OSError. `compute` is called by one thread at a time."""

    def __init__(self, config: PoolingConfig) -> None:
        spec, self.pooling = read_encoder_spec(config.model), read_pooling(config.model)
        device = torch.device(config.device)
        if device.type == "cpu":
            torch.set_num_threads(config.num_threads)
        dtype = resolve_dtype(config.dtype, device, spec.dtype)
        if spec.overflows and dtype == "float16":
            raise ValueError("--dtype float16: this model overflows in it: take bfloat16 or float32")
        marks = [f"dtype={dtype}"]
        if config.quantization != "auto":
            spec = replace(spec, quantization=ONLINE[config.quantization])
            marks.append(f"quantization={config.quantization}")
        self.device, self.vocab_size = device, spec.tokens.vocab_size
        self.max_model_len = resolve_max_model_len(
            config.max_model_len, min(self.pooling.max_len, spec.max_position_embeddings)
        )
        weights = Weights(getattr(torch, dtype), device, stored=spec.stored, most_elements=most_elements(config.model))
        self._encoder = Encoder(spec, weights, longest=self.max_model_len)
        self._labels = self._vectors = None
        if spec.classifier is not None and self.pooling.scoring is not None:
            self._labels = LabelHead(spec.classifier, self._encoder, self.pooling.scoring.activation)
        else:
            self._vectors = VectorHead(self.pooling, config.model, weights)
        _check_padding(spec, self.pooling)
        load_weights(weights, config.model)
        weights.settle()
        if device.type == "cuda":
            torch.set_num_threads(1)  # the host only launches: others' turns would delay it
        self._has_types = spec.tokens.num_types > 1
        self._passes = Passes(
            self._encoder, device, sizes=sizes_of(spec) if device.type == "cuda" and config.captures else ()
        )
        self.fingerprint = model_fingerprint(config.model, marks)
        # Tokens of each input of the last `compute` that others had computed.
        self.found: Sequence[int] = ()
        self.prefixes: Prefixes | None = None
        if can_share(spec):
            memory = PREFIX_BYTES[device.type] if config.prefix_bytes is None else config.prefix_bytes
            self.prefixes = Prefixes(
                spec,
                fingerprint=self.fingerprint,
                memory_bytes=memory,
                dtype=getattr(torch, dtype),
                device=device,
            )

    @torch.inference_mode()
    def compute(self, inputs: Sequence[PoolingInput]) -> list[torch.Tensor]:
        """Return each input's rows [rows, width] float32 on the CPU, in order: one row, or one for each token."""
        found = self._by_adapter(inputs)
        self.found = [tokens for _, tokens in found]
        return [rows for rows, _ in found]

    def _by_adapter(self, inputs: Sequence[PoolingInput]) -> list[_Found]:
        """A pass for the inputs of each adapter."""
        found = dict[int, _Found]()
        for adapter in dict.fromkeys(one.adapter for one in inputs):
            places = [at for at, one in enumerate(inputs) if one.adapter == adapter]
            found |= zip(places, self._compared([inputs[at] for at in places]), strict=True)
        return [found[at] for at in range(len(inputs))]

    def _compared(self, inputs: Sequence[PoolingInput]) -> list[_Found]:
        """The same for pairs that are compared."""
        pairs = [_halves(one) for one in inputs if one.work == MAXSIM]
        if not pairs:
            return self._computed(inputs)
        # Each side once: a query is compared with many documents.
        sides = list(dict.fromkeys(side for pair in pairs for side in pair))
        others = [one for one in inputs if one.work != MAXSIM]
        found = self._computed([*others, *sides])
        known = dict(zip(sides, found[len(others) :], strict=True))
        scores = [
            (maxsim(known[query][0], known[document][0]), known[query][1] + known[document][1])
            for query, document in pairs
        ]
        both, plain = iter(scores), iter(found)
        return [next(both if one.work == MAXSIM else plain) for one in inputs]

    def _computed(self, inputs: Sequence[PoolingInput]) -> list[_Found]:
        late = self.pooling.late
        seen = [seen_of(one.tokens, late) for one in inputs]
        order = sorted(range(len(inputs)), key=lambda at: (len(inputs[at].tokens), seen[at]))
        mine = [inputs[at] for at in order]
        with self._sharing(mine) as sharing:
            texts = Texts.of(
                [one.tokens for one in mine],
                [one.second if self._has_types else 0 for one in mine],
                seen=[seen[at] for at in order] if late is not None else None,
                sharing=sharing,
                sights=self._encoder.sights,
            )
            adapter = mine[0].adapter
            x = self._passes(texts, adapter=self.pooling.tasks.index(adapter) if adapter else None)
        spans = Spans.of(texts.lengths, [one.skipped for one in mine], self.device)
        rows = self._labelled(x, spans, mine) if self._labels is not None else self._embedded(x, spans, mine)
        begins = (0,) * len(mine) if sharing is None else sharing.begins
        return [each for _, each in sorted(zip(order, zip(rows, begins, strict=True), strict=True), key=itemgetter(0))]

    def _sharing(self, inputs: Sequence[PoolingInput]) -> AbstractContextManager[Sharing | None]:
        if self.prefixes is None:
            return nullcontext()
        return self.prefixes.shared(
            [Beginning(tokens=one.tokens, adapter=one.adapter, salt=one.salt) for one in inputs]
        )

    def _labelled(self, x: torch.Tensor, spans: Spans, mine: Sequence[PoolingInput]) -> list[torch.Tensor]:
        head, step = self._labels, self.pooling.scoring.step if self.pooling.scoring is not None else None
        assert head is not None
        scores = head.scores(x, spans)
        activated, plain = head.activated(scores).cpu(), scores.cpu()
        found = list[torch.Tensor]()
        for at, one in enumerate(mine):
            if one.work == CLASSIFY_TOKENS:
                own = x[spans.begins[at] : spans.begins[at] + spans.lengths[at]]
                if step is not None:
                    own = own[torch.tensor(one.tokens, device=x.device)[-len(own) :] == step]
                each = head.each(own)
                found.append((each if one.is_raw else head.activated(each)).cpu())
            else:
                found.append((plain if one.is_raw else activated)[at : at + 1])
        return found

    def _embedded(self, x: torch.Tensor, spans: Spans, mine: Sequence[PoolingInput]) -> list[torch.Tensor]:
        head = self._vectors
        assert head is not None
        found, kinds = dict[int, torch.Tensor](), defaultdict[tuple[int, bool], list[int]](list)
        each = head.each(x) if any(one.work == TOKENS for one in mine) else None
        late, heads = self.pooling.late, self.pooling.heads
        for at, one in enumerate(mine):
            own = slice(spans.begins[at], spans.begins[at] + spans.lengths[at])
            tokens = _last(one, spans.lengths[at])
            if one.work == TOKENS and each is not None:
                rows = each[own]
                if late is not None or heads is not None:
                    rows = rows[with_vectors(tokens, late, heads)]
                found[at] = cut(
                    rows, one.dimensions, normalizes=self._normalizes(one.dimensions, one.is_raw, TOKENS)
                ).cpu()
            elif one.work == CLASSIFY_TOKENS and heads is not None:
                found[at] = head.weights(x[own][with_weights(tokens, heads)], is_raw=one.is_raw).cpu()
            elif one.work == LEXICAL and heads is not None:
                found[at] = lexical(tokens, head.weights(x[own], is_raw=False).cpu(), heads)
            else:
                kinds[one.dimensions, one.is_raw].append(at)
        vectors = head.vectors(x, spans) if kinds else x
        for (size, is_raw), places in kinds.items():
            some = vectors if len(places) == len(mine) else vectors[places]
            rows = cut(some, size, normalizes=self._normalizes(size, is_raw)).cpu()
            found |= zip(places, rows.split(1), strict=True)
        return [found[at] for at in range(len(mine))]

    def _normalizes(self, dimensions: int, is_raw: bool, work: str = EMBED) -> bool:
        pooling = self.pooling
        are_normal = pooling.normalizes or (work == TOKENS and pooling.compares_tokens)
        return not is_raw and (are_normal or dimensions > 0)


def _last(one: PoolingInput, count: int) -> list[int]:
    """The last tokens of an input, where its work is one of tokens."""
    return [] if one.work == EMBED else list(one.tokens[-count:])


def _halves(pair: PoolingInput) -> tuple[PoolingInput, PoolingInput]:
    query, document = (
        PoolingInput(tokens=tuple(side), work=TOKENS, adapter=pair.adapter, salt=pair.salt)
        for side in (pair.tokens[: pair.second], pair.tokens[pair.second :])
    )
    return query, document


def _check_padding(spec: EncoderSpec, pooling: Pooling) -> None:
    """Raise UnsupportedModelError if padding that nobody sees would see nobody, or all that is before it."""
    late = pooling.late
    if late is None or late.padding is None or late.padding_is_seen:
        return
    attentions = [layer.attention for layer in spec.layers]
    if any(one.distances or one.is_causal or 0 < one.reach < late.query_length for one in attentions):
        raise UnsupportedModelError(
            f"queries padded to {late.query_length} tokens that others don't see are not computed where layers have windows"
            " of fewer tokens, biases by distance or an order"
        )
