"""The seam between a chain of guesses and the heads that make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from engine.batch.batch import ForwardBatch
from engine.kernels.embedding import InputTokens
from engine.model.decoder import Decoder
from engine.model.layers.building import Rotations, Surroundings, declare_branch
from engine.model.places import Part, kept_at
from engine.spec.model import BranchSpec, DraftSpec, ModelSpec
from engine.weights.loader import most_elements
from engine.weights.names import StoredNames
from engine.weights.parameters import Weights


class Rows(Protocol):
    """A head's rows of a pass, whose keys and values are in the pool."""

    def at(self, rows: torch.Tensor, sampled: torch.Tensor) -> Any:
        """Some of them, int64: by their rows of the pass, which are also those with these numbers among the sampled ones."""


class Drafter(Protocol):
    """A head with weights, or a draft model. One thread at a time.

    `kept`: what it takes of the pool, see `kept_in`. T rows, E hidden size.
    """

    def load(self) -> None:
        """Read the weights that aren't the model's. Raises CheckpointError."""

    def kept_in(self, parts: Sequence[Part]) -> Sequence[Any]:
        """The views of the pool's parts that its other methods take."""

    def read(self, tokens: InputTokens, batch: ForwardBatch, kept: Sequence[Any]) -> Rows:
        """Write the keys and values of all rows of the target's pass; `tokens` are those after each row."""


class DraftHead(Drafter, Protocol):
    """A drafter of one token after another."""

    def read_on(self, ids: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch, kept: Sequence[Any]) -> Any:
        """Write the keys and values of guessed tokens [T] int64, and return their rows; `hidden` [T, E] from `guess`."""

    def guess(self, rows: Any, batch: ForwardBatch, kept: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the likeliest tokens behind the rows [T] int64, and what the next step reads [T, E]."""


@runtime_checkable
class BlockHead(Drafter, Protocol):
    """A drafter of all tokens at once."""

    @property
    def sights(self) -> Sequence[bool]:
        """The kinds of inputs that it asks for, each once."""

    def guess_blocks(
        self, anchors: Any, rooms: Sequence[int], inputs: Callable[[bool], ForwardBatch], kept: Sequence[Any]
    ) -> torch.Tensor:
        """Return the likeliest tokens behind some of the `Rows` [S]: [S, K], of which `rooms` count, the most first.

        `inputs`: of the rows of all blocks, of which each sees those behind it unless it is causal.
        """


class HeadSpec(Protocol):
    """A head before it has weights."""

    @property
    def in_pool(self) -> DraftSpec:
        """Its layers, and what it reads."""

    def head(self, decoder: Decoder, max_model_len: int) -> DraftHead | BlockHead:
        """Declare the head of this decoder, whose weights come later."""


class Following(NamedTuple):
    """The tokens after the rows of a pass, which the first step reads."""

    ids: torch.Tensor  # [T] int64

    def at(self, rows: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        return self.ids.index_select(0, rows)


def first_rows(rooms: Sequence[int], device: torch.device, *, more: int = 0) -> torch.Tensor:
    """The first row [S] of each block, which has `more` rows than room; the most room first."""
    if rooms[0] == rooms[-1]:  # a graph can't be captured with a copy from the host
        return torch.arange(len(rooms), device=device) * (rooms[0] + more)
    return torch.tensor([sum(rooms[:number]) + number * more for number in range(len(rooms))], device=device)


def drafted_rows(firsts: torch.Tensor, rooms: Sequence[int]) -> torch.Tensor:
    """The rows [S, K] from these on. Beyond a block's room its last row stands in: what that says does not count."""
    steps = torch.arange(rooms[0], device=firsts.device)
    if rooms[0] != rooms[-1]:
        return firsts[:, None] + steps.minimum(torch.tensor(rooms, device=firsts.device)[:, None] - 1)
    return firsts[:, None] + steps


def layers_in(parts: Sequence[Part], decoder: Decoder) -> Sequence[Sequence[Any]]:
    """The views of each layer of a decoder's head."""
    return [kept_at(parts, places)[1] for places in decoder.spec.draft_places]


def layer_in(parts: Sequence[Part], decoder: Decoder) -> Sequence[Any]:
    """The views of the only one."""
    return layers_in(parts, decoder)[0]


def weights_of(decoder: Decoder, folder: Path, stored: StoredNames) -> Weights:
    """The weights of a head in a folder, uninitialised, of which each rank has its share."""
    return Weights(
        decoder.weights.dtype,
        decoder.weights.device,
        rank=decoder.group.rank,
        size=decoder.group.size,
        stored=stored,
        most_elements=most_elements(folder),
    )


def surroundings(
    decoder: Decoder, model: ModelSpec, weights: Weights, rotations: Rotations
) -> Callable[[str, BranchSpec], Surroundings]:
    """Return the function that makes the surroundings of half a layer below a prefix, which ranks share as the decoder's."""

    def around(under: str, branch: BranchSpec) -> Surroundings:
        declared = declare_branch(branch, model, weights, under=under)
        return Surroundings(model, weights, rotations, under, declared, group=decoder.group)

    return around


def known_alone(ids: torch.Tensor, batch: ForwardBatch) -> InputTokens:
    """Tokens [T] that don't depend on the pass before, for rows of this batch."""
    return InputTokens.known_alone(ids, batch.tokens.newest)
