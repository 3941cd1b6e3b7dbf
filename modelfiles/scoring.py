"""Files that say how a text, or a pair of texts, is scored: labels, words behind it, rewards of its steps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelfiles.files import CONFIG, TOKENIZER
from modelfiles.sentences import MODULES, PROMPTS, PoolingError, count_of, modules_of, object_of
from modelfiles.served import HEADED, REWARD, STEPS, named_in, names
from modelfiles.vocabulary import token_ids

EACH_STEP = "<extra_0>"  # Qwen's token behind each step of an answer
QWEN3_RERANKER = re.compile(r"(?:.*--)?Qwen3-Reranker-[0-9.]+B\Z")
QWEN3_WORDS = ("no", "yes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """A score for each label. With `words` the only one is a logit behind the text, or the difference of two."""

    labels: tuple[str, ...]
    activation: str  # "sigmoid", "softmax" or "": none
    words: tuple[int, ...] = ()  # tokens: the good one, and the bad one or none
    step: int | None = None  # each of these tokens has a score, and the text none
    has_each: bool = False  # every token has scores of its own


def is_qwen3_reranker(model: Path, config: Mapping[str, Any]) -> bool:
    """True for Qwen3-Reranker as it is published: a Qwen3 that generates, of which only the name tells."""
    is_named = any(map(QWEN3_RERANKER.match, model.parts[-3:]))
    return is_named and "Qwen3ForCausalLM" in named_in(config) and not (model / MODULES).is_file()


def is_scored(model: Path, config: Mapping[str, Any]) -> bool:
    """True for a model of scores. Raises PoolingError."""
    if any(name.endswith((HEADED, REWARD, STEPS)) for name in named_in(config)):
        return True
    return is_qwen3_reranker(model, config) or any(kind == "LogitScore" for kind, _ in modules_of(model))


def read_scoring(model: Path, config: Mapping[str, Any]) -> Scoring:
    """Raises PoolingError, OSError."""
    if any(name.endswith(STEPS) for name in named_in(config)):
        return Scoring(labels=_labels(config), activation="softmax", step=_token(model, EACH_STEP), has_each=True)
    if any(name.endswith(REWARD) for name in named_in(config)):
        return Scoring(labels=("LABEL_0",), activation="", has_each=True)
    words = _words(model, config)
    labels = ("LABEL_0",) if words else _labels(config)
    activation = _activation(model, config, len(labels))
    has_each = any(name.startswith(tuple(names()["decoders"])) for name in named_in(config))
    return Scoring(labels=labels, activation=activation, words=words, has_each=has_each)


def _words(model: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens whose logits are a score; (): a head has labels."""
    for kind, folder in modules_of(model):
        if kind == "LogitScore":
            own = object_of(model / folder, CONFIG, must_be=True)
            both = [own.get("true_token_id"), own.get("false_token_id")]
            if not isinstance(both[0], int) or not isinstance(both[1], int | None):
                raise PoolingError(f"{model / folder / CONFIG}: true_token_id and false_token_id must be token ids")
            return tuple(one for one in both if one is not None)
        if kind != "Transformer":
            raise PoolingError(f"{model / MODULES}: a module {kind} of scores is not computed: LogitScore is")
    said = QWEN3_WORDS if is_qwen3_reranker(model, config) else config.get("classifier_from_token")
    if said is None:
        return ()
    if not isinstance(said, list | tuple) or len(said) != 2 or not all(isinstance(one, str) for one in said):
        raise PoolingError(f"{model / CONFIG}: classifier_from_token must be two tokens, such as {list(QWEN3_WORDS)}")
    return _token(model, said[1]), _token(model, said[0])


def _token(model: Path, text: str) -> int:
    found = token_ids(model).get(text)
    if found is None:
        raise PoolingError(f"{model / TOKENIZER}: {text!r}, behind which this model scores, is no token")
    return found


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    given = config.get("id2label")
    known = given if isinstance(given, Mapping) else {}
    return tuple(str(known.get(str(at), f"LABEL_{at}")) for at in range(num_labels(config)))


def num_labels(config: Mapping[str, Any]) -> int:
    """The number of a classifier's labels. Raises PoolingError."""
    names, said = config.get("id2label"), config.get("num_labels")
    return len(names) if isinstance(names, Mapping) and names else count_of({"num_labels": said or 2}, "num_labels")


def _activation(model: Path, config: Mapping[str, Any], count: int) -> str:
    """The activation of scores: one is a probability and several are shares, unless the files say otherwise."""
    own = config.get("sentence_transformers")
    asked = (own.get("activation_fn") if isinstance(own, dict) else None) or config.get(
        "sbert_ce_default_activation_function"
    )
    asked = asked or object_of(model, PROMPTS).get("activation_fn")
    named = str(asked or "").rpartition(".")[2]
    if named not in ("", "Identity", "Sigmoid"):
        raise PoolingError(
            f"{model / CONFIG}: the activation {asked} of scores is not computed: Identity and Sigmoid are"
        )
    if named or config.get("problem_type") == "regression":
        return "sigmoid" if named == "Sigmoid" else ""
    return "sigmoid" if count == 1 or config.get("problem_type") == "multi_label_classification" else "softmax"


def read_template_options(model: Path) -> dict[str, Any]:
    """Variables for the chat template of pairs, which sentence-transformers keeps beside the model."""
    said = object_of(model, "sentence_bert_config.json").get("processing_kwargs")
    own = said.get("chat_template") if isinstance(said, dict) else None
    return dict(own) if isinstance(own, dict) else {}
