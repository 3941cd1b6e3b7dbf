"""Vectors of tokens, as a model's files describe them: ColBERT's markers and padding of queries, bge-m3's heads."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelfiles.sentences import PROMPTS, PoolingError, count_of, object_of
from modelfiles.served import named_in
from modelfiles.torchfile import TorchFileError, read_torch_file
from modelfiles.vocabulary import special_texts_of, token_ids

COLBERT_CLASS, METADATA = "HF_ColBERT", "artifact.metadata"
SPARSE_HEAD, COLBERT_HEAD = "sparse_linear.pt", "colbert_linear.pt"
GTE_CLASSES, GTE_HEAD = frozenset({"NewModel", "NewForTokenClassification"}), "classifier"
UNWEIGHTED = ("cls_token", "eos_token", "pad_token", "unk_token")  # FlagEmbedding's
MAX_VOCABULARY = 1 << 24  # token ids that float32 tells apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """ColBERT's treatment of texts: a marker behind the first token, and queries that are padded."""

    query: int  # markers
    document: int
    query_length: int
    document_length: int
    # Token behind a query, up to its length, whose vectors count; None: it is not padded.
    padding: int | None = None
    padding_is_seen: bool = False  # by a query's other tokens
    skipped: frozenset[int] = frozenset()  # tokens of a document without a vector


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHeads:
    """Heads beside an encoder whose text has a vector of its own (bge-m3, gte-multilingual-base)."""

    inputs: int  # the encoder's features
    size: int = 0  # features of a token's vector; 0: the encoder's own
    weighs: bool = False  # a weight of each token
    stored: str = ""  # module of the checkpoint with that head; "": SPARSE_HEAD
    unweighted: frozenset[int] = frozenset()  # tokens that are no words
    ends: tuple[int, ...] = ()  # tokens before and behind each text


def read_late(model: Path, config: Mapping[str, Any]) -> Late | None:
    """Markers and lengths as ColBERT's authors (artifact.metadata) or PyLate write them. Raises PoolingError, OSError."""
    if COLBERT_CLASS in named_in(config):
        return _of_colbert(model)
    said = object_of(model, PROMPTS)
    return _of_pylate(model, said) if isinstance(said.get("query_prefix"), str) else None


def colbert_size(model: Path) -> int:
    """Features of a token's vector. Raises PoolingError."""
    return count_of(_metadata(model), "dim")


def _metadata(model: Path) -> dict[str, Any]:
    return object_of(model, METADATA, must_be=True)


def _of_colbert(model: Path) -> Late:
    said = _metadata(model)
    for name, value in (("similarity", "cosine"), ("interaction", "colbert"), ("relu", False)):
        if said.get(name, value) not in (value, None):
            raise PoolingError(f"{model / METADATA}: {name} = {said[name]!r:.40} is not computed: {value!r} is")
    known, name = token_ids(model), str(model / METADATA)
    return Late(
        query=_id(known, str(said.get("query_token_id") or "[unused0]"), name),
        document=_id(known, str(said.get("doc_token_id") or "[unused1]"), name),
        query_length=count_of({"query_maxlen": 32, **said}, "query_maxlen"),
        document_length=count_of({"doc_maxlen": 220, **said}, "doc_maxlen"),
        padding=_mask(model, known),
        padding_is_seen=said.get("attend_to_mask_tokens") is True,
        skipped=_ids(known, string.punctuation) if said.get("mask_punctuation", True) else frozenset(),
    )


def _of_pylate(model: Path, said: Mapping[str, Any]) -> Late:
    known, name = token_ids(model), str(model / PROMPTS)
    words = said.get("skiplist_words")
    return Late(
        query=_id(known, str(said["query_prefix"]), name),
        document=_id(known, str(said.get("document_prefix") or "[D] "), name),
        query_length=count_of({"query_length": said.get("query_length") or 32}, "query_length"),
        document_length=count_of({"document_length": said.get("document_length") or 180}, "document_length"),
        padding=_mask(model, known) if said.get("do_query_expansion", True) else None,
        padding_is_seen=said.get("attend_to_expansion_tokens") is True,
        skipped=_ids(known, [str(word) for word in words] if isinstance(words, list) else string.punctuation),
    )


def _mask(model: Path, known: Mapping[str, int]) -> int:
    texts = special_texts_of(model, "mask_token") or ["[MASK]"]
    return _id(known, texts[0], str(model / "tokenizer_config.json"))


def _id(known: Mapping[str, int], text: str, file: str) -> int:
    """Raises PoolingError: as a text of several tokens a marker would be another one."""
    found = known.get(text, known.get(text.strip()))
    if found is None:
        raise PoolingError(f"{file}: {text!r:.40} is no token of tokenizer.json")
    return found


def _ids(known: Mapping[str, int], texts: Any) -> frozenset[int]:
    return frozenset(known[text] for text in texts if text in known)


def has_gte_head(config: Mapping[str, Any]) -> bool:
    """True for an encoder of GTE's whose checkpoint has a head of tokens' weights: both classes are named, with one label."""
    return set(named_in(config)) >= GTE_CLASSES and len(config.get("id2label") or ()) == 1


def read_token_heads(model: Path, config: Mapping[str, Any], hidden: int) -> TokenHeads | None:
    """Heads as FlagEmbedding keeps them, in files of torch.save, or as GTE does. Raises PoolingError, OSError."""
    shapes = {name: _shape(model / name, hidden) for name in (SPARSE_HEAD, COLBERT_HEAD) if (model / name).is_file()}
    is_gte = not shapes and has_gte_head(config)
    if not shapes and not is_gte:
        return None
    if shapes.get(SPARSE_HEAD, 1) != 1:
        raise PoolingError(f"{model / SPARSE_HEAD}: a token has one weight, not {shapes[SPARSE_HEAD]}")
    weighs = is_gte or SPARSE_HEAD in shapes
    if weighs and count_of(config, "vocab_size") > MAX_VOCABULARY:
        raise PoolingError(
            f"{model / (GTE_HEAD if is_gte else SPARSE_HEAD)}: weights of more than {MAX_VOCABULARY} tokens are not computed"
        )
    known = token_ids(model)
    ends = [config.get(name) for name in ("bos_token_id", "eos_token_id")]
    return TokenHeads(
        inputs=hidden,
        size=shapes.get(COLBERT_HEAD, 0),
        weighs=weighs,
        stored=GTE_HEAD if is_gte else "",
        unweighted=_ids(known, special_texts_of(model, *UNWEIGHTED)),
        ends=tuple(one for one in ends if isinstance(one, int)),
    )


def _shape(file: Path, hidden: int) -> int:
    """The head's outputs, each of all features and a bias."""
    try:
        found = {name: one.shape for name, one in read_torch_file(file).items()}
    except TorchFileError as error:
        raise PoolingError(str(error)) from None
    outputs = math.prod(found.get("bias", (0,)))
    if found != {"weight": (outputs, hidden), "bias": (outputs,)} or not outputs:
        raise PoolingError(f"{file}: a weight of [outputs, {hidden}] and its bias are expected, not {found}")
    return outputs
