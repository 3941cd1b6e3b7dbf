"""Files beside the weights that say how tokens' vectors become an answer, as sentence-transformers writes them.

Classes and what computes them are `engine.pooling`'s; nothing here reads a tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from modelfiles.files import CONFIG, TOKENIZER_CONFIG, is_model
from modelfiles.gguf import is_gguf
from modelfiles.served import HEADED, named_in, pooled_names

MODULES, SENTENCES, PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
EMBED, TOKENS, CLASSIFY = "embed", "token_embed", "classify"
# `pooling_mode` of sentence-transformers, and the older switch of each.
MODES = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")
MAX_LEN = 1 << 20
_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")  # modules


class PoolingError(ValueError):
    """A model's files ask for something that isn't computed here; the message names file and field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayer:
    """A product behind the pooling, in a folder of its own."""

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
    """From tokens' vectors to an answer. A vector has `size` features; a classifier has `labels`, and gives a score for each."""

    size: int
    max_len: int  # tokens of an input, those that every text gets among them
    modes: tuple[str, ...] = ("mean",)  # keys of `MODES`; of several the vectors stand one behind the other
    dense: tuple[DenseLayer, ...] = ()
    normalizes: bool = False
    similarity: str = "cosine"
    prompts: Prompts = field(default_factory=Prompts)
    labels: tuple[str, ...] = ()  # (): vectors
    activation: str = ""  # "sigmoid", "softmax" or "": none
    sizes: tuple[int, ...] = ()  # shorter vectors that it was trained for, where it says so

    @property
    def works(self) -> tuple[str, ...]:
        return (CLASSIFY,) if self.labels else (EMBED, TOKENS)


@lru_cache(maxsize=64)
def _named(model: Path, _changed: int) -> tuple[str, ...] | None:
    try:
        return tuple(named_in(_object(model, CONFIG)))
    except ValueError:
        return None  # told where the configuration is checked


def is_pooled(model: Path) -> bool:
    """True for a model of embeddings or scores, which generates nothing."""
    if is_gguf(model) or not is_model(model):
        return False
    named = _named(model, (model / CONFIG).stat().st_mtime_ns)
    if named is None:
        return False
    return (model / MODULES).is_file() or any(name.endswith(HEADED) or name in pooled_names() for name in named)


def read_pooling(model: Path) -> Pooling:
    """Raises PoolingError, OSError."""
    config = _object(model, CONFIG)
    hidden = _count(config, "hidden_size", "n_embd")
    if any(name.endswith(HEADED) for name in named_in(config)):
        return _classifier(model, config, hidden)
    modes: tuple[str, ...] = ("mean",)
    are_pooled, dense, normalizes, size = True, list[DenseLayer](), False, hidden
    for kind, folder in _modules(model):
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
                raise PoolingError(f"{model / MODULES}: a module {kind} is not computed: {', '.join(_ORDER)} are")
    sizes = config.get("matryoshka_dimensions")
    return Pooling(
        size=size,
        max_len=longest(model, config),
        modes=modes,
        dense=tuple(dense),
        normalizes=normalizes,
        similarity=str(_object(model, PROMPTS).get("similarity_fn_name") or "cosine"),
        prompts=_prompts(model, are_pooled=are_pooled),
        sizes=tuple(one for one in sizes if isinstance(one, int)) if isinstance(sizes, list) else (),
    )


def _prompts(model: Path, *, are_pooled: bool) -> Prompts:
    said = _object(model, PROMPTS)
    given = said.get("prompts")
    texts = {name: text for name, text in given.items() if isinstance(text, str)} if isinstance(given, dict) else {}
    default = str(said.get("default_prompt_name"))
    return Prompts(texts=texts, default=default if default in texts else "", are_pooled=are_pooled)


def longest(model: Path, config: Mapping[str, Any]) -> int:
    """The most tokens of an input: what its files cut texts to, at most the model's positions."""
    positions = config.get("max_position_embeddings") or config.get("n_positions")
    found: list[Any] = [positions - first_position(config)] if isinstance(positions, int) else []
    found += [_object(model, SENTENCES).get("max_seq_length"), _object(model, TOKENIZER_CONFIG).get("model_max_length")]
    told = [one for one in found if isinstance(one, int) and 0 < one <= MAX_LEN]
    return min(told, default=512)


def first_position(config: Mapping[str, Any]) -> int:
    """The number of an input's first position: RoBERTa's kin count from the one behind their padding's."""
    is_shifted = config.get("model_type") in ("roberta", "xlm-roberta", "camembert", "mpnet", "xlm-roberta-xl")
    padding = config.get("pad_token_id")
    return (padding if isinstance(padding, int) else 1) + 1 if is_shifted else 0


def num_labels(config: Mapping[str, Any]) -> int:
    """The number of a classifier's labels. Raises PoolingError."""
    names, said = config.get("id2label"), config.get("num_labels")
    return len(names) if isinstance(names, Mapping) and names else _count({"num_labels": said or 2}, "num_labels")


def _classifier(model: Path, config: Mapping[str, Any], hidden: int) -> Pooling:
    """Labels and activation of a classifier, or of a cross-encoder, whose one score is a probability unless it says otherwise."""
    names = config.get("id2label")
    count = num_labels(config)
    labels = [
        str(names.get(str(at), f"LABEL_{at}")) if isinstance(names, dict) else f"LABEL_{at}" for at in range(count)
    ]
    own = config.get("sentence_transformers")
    asked = (own.get("activation_fn") if isinstance(own, dict) else None) or config.get(
        "sbert_ce_default_activation_function"
    )
    named = str(asked or "").rpartition(".")[2]
    if named not in ("", "Identity", "Sigmoid"):
        raise PoolingError(
            f"{model / CONFIG}: the activation {asked} of scores is not computed: Identity and Sigmoid are"
        )
    if not named:
        is_several = config.get("problem_type") == "multi_label_classification"
        activation = "sigmoid" if count == 1 or is_several else "softmax"
    else:
        activation = "sigmoid" if named == "Sigmoid" else ""
    return Pooling(
        size=hidden,
        max_len=longest(model, config),
        labels=tuple(labels),
        activation=activation,
    )


def _modules(model: Path) -> list[tuple[str, str]]:
    """Kind and folder of each module, in order; class paths moved between releases, so the last component counts."""
    if not (model / MODULES).is_file():
        return []
    read = _read(model / MODULES)
    if not isinstance(read, list) or not all(isinstance(one, dict) for one in read):
        raise PoolingError(f"{model / MODULES}: must be a list of modules")
    found = [(str(one.get("type", "")).rpartition(".")[2], str(one.get("path") or "")) for one in read]
    for _, folder in found:
        if os.path.isabs(folder) or ".." in Path(folder).parts:
            raise PoolingError(f"{model / MODULES}: path {folder!r} is outside of the model's folder")
    places = [_ORDER.index(kind) for kind, _ in found if kind in _ORDER]
    if places != sorted(places):
        raise PoolingError(f"{model / MODULES}: modules are computed in this order alone: {', '.join(_ORDER)}")
    return found


def _modes(model: Path, folder: str) -> tuple[tuple[str, ...], bool]:
    """The ways of pooling, and whether a prompt's tokens are pooled, too."""
    own = _object(model / folder, CONFIG)
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
    own = _object(model / folder, CONFIG)
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
        outputs=_count(own, "out_features"),
        has_bias=own.get("bias") is not False,
        activation=activation,
    )


def _count(fields: Mapping[str, Any], *names: str) -> int:
    found = next((fields[name] for name in names if name in fields), None)
    if not isinstance(found, int) or not 0 < found <= MAX_LEN:
        raise PoolingError(f"config.json: {names[0]} must be a number above 0, not {found!r:.40}")
    return found


def _object(model: Path, name: str) -> dict[str, Any]:
    """A JSON object; empty if there is none. Raises PoolingError."""
    file = model / name
    read = _read(file) if file.is_file() else {}
    if not isinstance(read, dict):
        raise PoolingError(f"{file} is no JSON object")
    return read


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise PoolingError(f"{file} is not JSON: {error}") from None
