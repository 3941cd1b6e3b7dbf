"""Files beside the weights that say how tokens' vectors become an answer, as sentence-transformers writes them.

Classes and what computes them are `engine.pooling`'s; nothing here reads a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from modelfiles.files import CONFIG, TOKENIZER_CONFIG, is_model
from modelfiles.gguf import is_gguf
from modelfiles.jina import adapter_of, prompts_of, tasks_of, with_others_names
from modelfiles.late import COLBERT_CLASS, Late, TokenHeads, colbert_size, read_late, read_token_heads
from modelfiles.scoring import Scoring, is_scored, read_scoring
from modelfiles.sentences import (
    MAX_LEN,
    MODULES,
    ORDER,
    PROMPTS,
    SENTENCES,
    PoolingError,
    count_of,
    modules_of,
    object_of,
)
from modelfiles.served import decoders, named_in, pooled_names

__all__ = ["MODULES", "PoolingError", "is_pooled", "read_pooling"]

EMBED, TOKENS, CLASSIFY, CLASSIFY_TOKENS = "embed", "token_embed", "classify", "token_classify"
# A query's vectors of tokens with a document's: each one's nearest, added up.
MAXSIM = "maxsim"
LEXICAL = "lexical"  # number and weight of each token
EACH = (TOKENS, CLASSIFY_TOKENS, LEXICAL)  # works with several rows of an input
# `pooling_mode` of sentence-transformers, and the older switch of each.
MODES = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
SIDES = ("query", "document")
# Memory for what texts begin with alike, by device, where a model shares it.
PREFIX_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayer:
    """A product behind the pooling, in a folder of its own; "": `linear` among the encoder's weights."""

    folder: str
    inputs: int
    outputs: int
    has_bias: bool
    activation: str  # one of `ACTIVATIONS`


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Texts that a model wants before its inputs, by name."""

    texts: Mapping[str, str] = field(default_factory=dict)
    default: str = ""  # a name; "": none
    are_pooled: bool = True  # False: no vector is pooled from their tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """From tokens' vectors to an answer. A vector has `size` features; what is scored has `labels`."""

    size: int
    max_len: int  # tokens of an input, those that every text gets among them
    # Keys of `MODES`; of several the vectors stand one behind the other. (): only tokens have vectors (ColBERT).
    modes: tuple[str, ...] = ("mean",)
    dense: tuple[DenseLayer, ...] = ()
    normalizes: bool = False
    similarity: str = "cosine"
    prompts: Prompts = field(default_factory=Prompts)
    scoring: Scoring | None = None  # None: vectors
    sizes: tuple[int, ...] = ()  # shorter vectors that it was trained for, where it says so
    late: Late | None = None  # ColBERT's treatment of queries and documents; None: texts as they are
    heads: TokenHeads | None = None  # heads of tokens beside a text's vector
    tasks: tuple[str, ...] = ()  # names of its adapters

    @property
    def labels(self) -> tuple[str, ...]:
        return self.scoring.labels if self.scoring is not None else ()

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return len(self.labels) or self.size

    def adapter_of(self, prompt: str) -> str:
        """The adapter for inputs behind this prompt, by the prompt's name; "": none."""
        return adapter_of(prompt, self.tasks)

    def width_of(self, work: str) -> int:
        """Numbers of a row of this work."""
        if self.scoring is None and work in (CLASSIFY_TOKENS, LEXICAL):
            return 2 if work == LEXICAL else 1
        return self.heads.size if work == TOKENS and self.compares_tokens and self.heads is not None else self.width

    @property
    def compares_tokens(self) -> bool:
        """True if vectors of tokens have length 1, to be compared."""
        return not self.modes or (self.heads is not None and self.heads.size > 0)

    @property
    def works(self) -> tuple[str, ...]:
        if self.scoring is None and not self.modes:
            return TOKENS, MAXSIM
        if self.scoring is None:
            weighs = self.heads is not None and self.heads.weighs
            return (EMBED, TOKENS, CLASSIFY_TOKENS, LEXICAL) if weighs else (EMBED, TOKENS)
        texts = (CLASSIFY,) if self.scoring.step is None else ()
        return (*texts, CLASSIFY_TOKENS) if self.scoring.has_each else texts


@lru_cache(maxsize=64)
def _is_named(model: Path, _changed: int) -> bool | None:
    """True if its class says that a model is pooled; None: it says nothing that can be read."""
    try:
        config = object_of(model, CONFIG)
        return is_scored(model, config) or any(name in pooled_names() for name in named_in(config))
    except ValueError:
        return None  # told where the configuration is checked


def is_pooled(model: Path) -> bool:
    """True for a model of embeddings or scores, which generates nothing."""
    if is_gguf(model) or not is_model(model):
        return False
    is_named = _is_named(model, (model / CONFIG).stat().st_mtime_ns)
    return is_named is not None and (is_named or (model / MODULES).is_file())


def shares_prefixes(model: Path) -> bool:
    """True for a pooled model whose tokens see none behind them, so that beginnings of texts are computed once."""
    config = object_of(model, CONFIG)
    named = named_in(config)
    if any(name.startswith("Gemma3Text") for name in named):
        return not config.get("use_bidirectional_attention")
    is_decoder = any(name.startswith(family) for name in named for family in decoders())
    return is_decoder and config.get("is_causal") is not False


def read_pooling(model: Path) -> Pooling:
    """Raises PoolingError, OSError."""
    config = object_of(model, CONFIG)
    hidden = count_of(config, "hidden_size", "n_embd")
    if is_scored(model, config):
        scoring = read_scoring(model, config)
        return Pooling(
            size=hidden, max_len=longest(model, config), prompts=_prompts(model, are_pooled=True), scoring=scoring
        )
    steps = _of_colbert(model, hidden) if COLBERT_CLASS in named_in(config) else _steps(model, hidden)
    sizes = config.get("matryoshka_dimensions")
    return Pooling(
        size=steps.dense[-1].outputs if steps.dense else hidden * len(steps.modes),
        max_len=longest(model, config),
        modes=steps.modes,
        dense=steps.dense,
        normalizes=steps.normalizes,
        similarity=str(object_of(model, PROMPTS).get("similarity_fn_name") or "cosine"),
        prompts=_prompts(model, are_pooled=steps.are_pooled, config=config),
        tasks=tasks_of(config),
        sizes=tuple(one for one in sizes if isinstance(one, int)) if isinstance(sizes, list) else (),
        late=read_late(model, config) if not steps.modes else None,
        heads=read_token_heads(model, config, hidden) if steps.modes else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    modes: tuple[str, ...]
    dense: tuple[DenseLayer, ...]
    normalizes: bool
    are_pooled: bool = True


def _of_colbert(model: Path, hidden: int) -> _Steps:
    """A product of each token's vector, whatever modules are beside it."""
    product = DenseLayer(folder="", inputs=hidden, outputs=colbert_size(model), has_bias=False, activation="Identity")
    return _Steps(modes=(), dense=(product,), normalizes=True)


def _steps(model: Path, hidden: int) -> _Steps:
    """The modules behind the encoder. Raises PoolingError."""
    modes: tuple[str, ...] = ("mean",)
    are_pooled, dense, normalizes, size = True, list[DenseLayer](), False, hidden
    kinds = modules_of(model)
    for kind, folder in kinds:
        match kind:
            case "Pooling":
                modes, are_pooled = _modes(model, folder)
                size = hidden * len(modes)
            case "Dense":
                dense.append(_dense(model, folder, size))
                size = dense[-1].outputs
            case "Normalize":
                normalizes = True
            case "Transformer":
                pass
            case _:
                raise PoolingError(f"{model / MODULES}: a module {kind} is not computed: {', '.join(ORDER)} are")
    if dense and not any(kind == "Pooling" for kind, _ in kinds):
        modes, normalizes = (), True
    return _Steps(modes=modes, dense=tuple(dense), normalizes=normalizes, are_pooled=are_pooled)


def _prompts(model: Path, *, are_pooled: bool, config: Mapping[str, Any] = MappingProxyType({})) -> Prompts:
    said, tasks = object_of(model, PROMPTS), tasks_of(config)
    given = said.get("prompts")
    texts = {name: text for name, text in given.items() if isinstance(text, str)} if isinstance(given, dict) else {}
    texts = with_others_names(prompts_of(config) | texts, tasks)
    for name in SIDES:  # ColBERT has a marker for each
        if isinstance(said.get(f"{name}_prefix"), str) or COLBERT_CLASS in named_in(config):
            texts.setdefault(name, "")
    default = str(said.get("default_prompt_name"))
    return Prompts(texts=texts, default=default if default in texts else "", are_pooled=are_pooled)


def longest(model: Path, config: Mapping[str, Any]) -> int:
    """The most tokens of an input: what its files cut texts to, at most the model's positions."""
    positions = config.get("max_position_embeddings") or config.get("n_positions")
    found: list[Any] = [positions - first_position(config)] if isinstance(positions, int) else []
    found += [
        object_of(model, SENTENCES).get("max_seq_length"),
        object_of(model, TOKENIZER_CONFIG).get("model_max_length"),
    ]
    told = [one for one in found if isinstance(one, int) and 0 < one <= MAX_LEN]
    return min(told, default=512)


def first_position(config: Mapping[str, Any]) -> int:
    """The number of an input's first position: RoBERTa's kin count from the one behind their padding's."""
    is_shifted = config.get("model_type") in ("roberta", "xlm-roberta", "camembert", "mpnet", "xlm-roberta-xl")
    padding = config.get("pad_token_id")
    return (padding if isinstance(padding, int) else 1) + 1 if is_shifted else 0


def _modes(model: Path, folder: str) -> tuple[tuple[str, ...], bool]:
    """The ways of pooling, and whether a prompt's tokens are pooled, too."""
    own = object_of(model / folder, CONFIG, must_be=True)
    said = own.get("pooling_mode")
    given = [said] if isinstance(said, str) else said if isinstance(said, list) else None
    if given is None:
        given = [mode for mode, switch in MODES.items() if own.get(switch)] or ["mean"]
    if not given or (unknown := [mode for mode in given if not isinstance(mode, str) or mode not in MODES]):
        named = repr(unknown[0]) if given else "of none"
        raise PoolingError(
            f"{model / folder / CONFIG}: pooling_mode {named:.40} is not computed: {', '.join(MODES)} are"
        )
    return tuple(given), own.get("include_prompt") is not False


def _dense(model: Path, folder: str, inputs: int) -> DenseLayer:
    own = object_of(model / folder, CONFIG, must_be=True)
    activation = str(own.get("activation_function") or "torch.nn.Tanh").rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise PoolingError(
            f"{model / folder / CONFIG}: activation_function {activation!r} is not computed: {', '.join(ACTIVATIONS)} are"
        )
    if (given := own.get("in_features")) != inputs:
        raise PoolingError(
            f"{model / folder / CONFIG}: in_features {given!r}, and {inputs} come from the module before it"
        )
    return DenseLayer(
        folder=folder,
        inputs=inputs,
        outputs=count_of(own, "out_features"),
        has_bias=own.get("bias") is not False,
        activation=activation,
    )
