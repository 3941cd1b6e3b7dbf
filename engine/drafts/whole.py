"""A draft model: any smaller model of the same tokenizer, which guesses greedily (Leviathan et al., arXiv 2211.17192).

Row i reads token i, as the target's does, and stands at position i. Its layers are further layers of the target's blocks, so
whoever has a sequence's blocks has the draft model's keys and values. T rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.batch.batch import ForwardBatch
from engine.config import EngineConfig
from engine.drafts.heads import DraftHead, Following, known_alone
from engine.drafts.vocabulary import first_difference, tokens_of
from engine.families import read_model_spec
from engine.kernels.embedding import InputTokens
from engine.model.decoder import Decoder
from engine.model.places import Part
from engine.spec.attention import AttentionSpec
from engine.spec.model import DraftSpec, ModelSpec, UnsupportedModelError
from engine.weights.loader import load_weights, most_elements
from modelfiles.files import TOKENIZER, read_file


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelSpec:
    """A draft model in a folder, or in a GGUF file."""

    folder: Path
    model: ModelSpec

    @property
    def in_pool(self) -> DraftSpec:
        own = self.model
        return DraftSpec(
            layers=own.layers, hidden_size=own.hidden_size, aux_layers=(), is_model=True, attends=True, ahead=1
        )

    def head(self, decoder: Decoder, max_model_len: int) -> DraftHead:
        return DraftModel(self, decoder, max_model_len)


def read_draft_model(folder: Path, config: EngineConfig, target: ModelSpec, *, longest: int) -> DraftModelSpec:
    """Read a model that drafts for `config.model`, whose sequences have at most `longest` tokens.

    Raises UnsupportedModelError if it has another tokenizer, or keeps what blocks of tokens have no place for.
    """
    model = read_model_spec(folder, device=config.device, dtype=config.dtype).within(longest)
    _check_tokenizers(folder, config.model)
    mixers = [layer.mixer for layer in model.layers if layer.mixer is not None]
    if not mixers or not all(isinstance(mixer, AttentionSpec) for mixer in mixers):
        raise UnsupportedModelError(
            "a draft model's layers have attention with keys and values: no MLA, no recurrent states"
        )
    if any(model.windows) and any(kept.window for kept in target.kept):
        raise UnsupportedModelError(
            "both models have layers with a window: --disable-hybrid-kv-cache-manager keeps all of their positions"
        )
    return DraftModelSpec(folder=folder, model=model)


def _check_tokenizers(folder: Path, target: Path) -> None:
    """Raise UnsupportedModelError, naming the first token that differs. A target without a tokenizer takes any model."""
    ours, theirs = read_file(target, TOKENIZER), read_file(folder, TOKENIZER)
    if ours is None or ours == theirs:
        return
    if theirs is None:
        raise UnsupportedModelError(f"no {TOKENIZER}: a draft model has its target's tokenizer")
    if differs := first_difference(tokens_of(theirs), tokens_of(ours)):
        raise UnsupportedModelError(
            f"{TOKENIZER}: token {differs.id} is {differs.here!r}, and the model's is {differs.there!r}: a draft model has its"
            " target's tokenizer"
        )


class DraftModel:
    """The model's weights, uninitialised until loaded, and its steps. One thread at a time."""

    def __init__(self, spec: DraftModelSpec, target: Decoder, max_model_len: int) -> None:
        self._folder = spec.folder
        self._decoder = Decoder(
            spec.model,
            dtype=target.weights.dtype,
            device=target.weights.device,
            max_model_len=max_model_len,
            most_elements=most_elements(spec.folder),
            places=target.spec.draft_places,
            group=target.group,
        )
        # Tables of one tokenizer are padded differently.
        self._last_id = min(spec.model.vocab_size, target.spec.vocab_size) - 1

    def load(self) -> None:
        """Read the weights. Raises CheckpointError."""
        load_weights(self._decoder.weights, self._folder)
        self._decoder.weights.settle()

    def kept_in(self, parts: Sequence[Part]) -> Sequence[Part]:
        return parts

    def read(self, tokens: InputTokens, batch: ForwardBatch, kept: Sequence[Part]) -> Following:
        """Compute the rows' own tokens without logits; see `DraftHead`."""
        own = known_alone(batch.tokens.ids().clamp(max=self._last_id), batch)
        self._decoder.forward(replace(batch, tokens=own, num_sampled=0, final=None), kept)
        return Following(tokens.ids())

    def read_on(
        self, ids: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch, kept: Sequence[Part]
    ) -> torch.Tensor:
        """Return the tokens as they are: `guess` writes their keys and values."""
        return ids

    def guess(self, rows: torch.Tensor, batch: ForwardBatch, kept: Sequence[Part]) -> tuple[torch.Tensor, torch.Tensor]:
        own = known_alone(rows.clamp(max=self._last_id), batch)
        logits = self._decoder.forward(replace(batch, tokens=own, sampled_rows=None), kept)
        assert logits is not None, "all rows have logits"
        ids = logits[:, : self._last_id + 1].argmax(-1)
        return ids, ids
