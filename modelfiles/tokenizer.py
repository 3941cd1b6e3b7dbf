"""Conversion of a GGUF file's tokenizer to a model folder's: tokenizer.json, tokenizer_config.json, generation_config.json.

GGUF names a tokenizer's rules instead of holding them; what each name means is a table here. An unknown name is refused:
rules that are nearly right make other tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from modelfiles.gguf import GgufError
from modelfiles.splits import splits

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # tokenizer.ggml.token_type
_BESIDE = "put the model's tokenizer.json beside the file"
_SPACE = "\u2581"
_MAX_PIECE = 512  # characters; every split into two pieces is tried
# End tokens without an id in the file are plain control tokens: end of turn, and end of a message that a tool answers.
_ENDS_OF_TURNS = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|return|>", "<eos>"}
_ENDS_OF_TURNS |= {"<|endoftext|>", "<|end_of_text|>"}
_END_TEXTS = {"eot_token_id": _ENDS_OF_TURNS, "eom_token_id": {"<|eom_id|>", "<|eom|>", "<|tool_response>"}}
# GGUF names of the default sampling parameters -> those of generation_config.json.
_SAMPLING = {f"general.sampling.{name}": name for name in ("top_k", "top_p", "min_p")}
_SAMPLING |= {"general.sampling.temp": "temperature", "general.sampling.penalty_repeat": "repetition_penalty"}

# gpt-oss ends an answer with one of these, and a part of it, such as reasoning, with a token that ends answers elsewhere.
_HARMONY, _END_OF_A_PART = {"<|return|>", "<|call|>"}, "<|end|>"


def is_there(metadata: Mapping[str, Any]) -> bool:
    """True if a GGUF file has a tokenizer of a kind that `tokenizer_json` converts."""
    kind = metadata.get("tokenizer.ggml.model")
    return isinstance(kind, str) and kind in _MODELS


def tokenizer_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Convert to a tokenizer.json. Raises GgufError for unknown rules."""
    kind = metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in _MODELS:
        raise GgufError(f"tokenizer.ggml.model = {kind!r:.40} is not supported: {_BESIDE}")
    tokens = _list(metadata, "tokens", str)
    if not 0 < (longest := max(map(len, tokens), default=0)) <= _MAX_PIECE:
        raise GgufError(f"the file has no tokens, or one of more than {_MAX_PIECE} letters ({longest}): {_BESIDE}")
    types = _list(metadata, "token_type", int) or [1] * len(tokens)
    if len(types) != len(tokens):
        raise GgufError(f"tokenizer.ggml.token_type describes {len(types)} tokens of {len(tokens)}")
    described: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(index, tokens[index], types[index]) for index in _added_ids(tokens, types)],
        "post_processor": _around(metadata, tokens),
    }
    return described | _MODELS[kind](metadata, _vocabulary(tokens, types), tokens)


def without_legacy(described: Mapping[str, Any]) -> dict[str, Any]:
    """A SentencePiece tokenizer whose space is prepended to the text's beginning alone, not behind control tokens."""
    prepended = any(each["type"] == "Prepend" for each in described["normalizer"]["normalizers"])
    scheme = "first" if prepended else "never"
    space = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": False}
    return {**described, "normalizer": None, "pre_tokenizer": space}


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Special tokens' names, and the chat templates."""
    tokens = _list(metadata, "tokens", str)
    config: dict[str, Any] = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown")):
        index = _id(metadata, f"{key}_token_id", len(tokens))
        if index is not None:
            config[name] = tokens[index]
    template = metadata.get("tokenizer.chat_template")
    others = {
        name: metadata[f"tokenizer.chat_template.{name}"]
        for name in _list(metadata, "chat_templates", str, under="tokenizer")
        if f"tokenizer.chat_template.{name}" in metadata
    }
    if isinstance(template, str) and others:
        named = {"default": template} | others
        config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    elif isinstance(template, str):
        config["chat_template"] = template
    return config


def generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The model's generation defaults: tokens that end an answer, and the makers' sampling parameters."""
    config = {name: metadata[key] for key, name in _SAMPLING.items() if key in metadata}
    ends = _ends(metadata, _list(metadata, "tokens", str))
    return config | ({"eos_token_id": list(dict.fromkeys(ends))} if ends else {})


def _ends(metadata: Mapping[str, Any], tokens: list[str]) -> list[int]:
    named = {key: _id(metadata, key, len(tokens)) for key in ("eos_token_id", *_END_TEXTS)}
    ends = [index for index in named.values() if index is not None]
    types = _list(metadata, "token_type", int)
    controls = {text: index for index, (text, kind) in enumerate(zip(tokens, types, strict=False)) if kind == _CONTROL}
    if controls.keys() >= _HARMONY:
        others = controls.keys() & {*_HARMONY, "<|endoftext|>"}
        return [index for index in ends if tokens[index] != _END_OF_A_PART] + sorted(controls[text] for text in others)
    unnamed = {text for key, texts in _END_TEXTS.items() if named[key] is None for text in texts}
    return ends + [index for text, index in controls.items() if text in unnamed]


def num_tokens(metadata: Mapping[str, Any]) -> int:
    return len(_list(metadata, "tokens", str))


def _bpe(metadata: Mapping[str, Any], vocabulary: dict[str, int], tokens: list[str]) -> dict[str, Any]:
    """A byte-level BPE as in GPT-2: bytes mapped to characters, and merges in order."""
    named = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(named, str) or named not in splits():
        raise GgufError(f"tokenizer.ggml.pre = {named!r:.40} is not supported: {_BESIDE}")
    rules = splits()[named]
    return {
        "normalizer": {"type": rules.normalizer} if rules.normalizer else None,
        "pre_tokenizer": rules.pre_tokenizer,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _model(vocabulary, _listed(metadata)) | {"ignore_merges": rules.whole_words},
    }


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: dict[str, int], tokens: list[str]) -> dict[str, Any]:
    """A SentencePiece BPE as in Llama: scored pieces, byte fallback, escaped spaces. Merges go by score, or Gemma 4's list."""
    scores = _list(metadata, "scores", float)
    if len(scores) != len(tokens):
        raise GgufError(f"tokenizer.ggml.scores has {len(scores)} values for {len(tokens)} tokens: {_BESIDE}")
    types = _list(metadata, "token_type", int)
    unknown = next((tokens[index] for index, kind in enumerate(types) if kind == _UNKNOWN), None)
    begins_with_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if begins_with_space else []
    decoders = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins_with_space else []),
    ]
    others = (_UNKNOWN, _CONTROL)
    own = {text for text, index in vocabulary.items() if index >= len(types) or types[index] not in others}
    is_listed = metadata["tokenizer.ggml.model"] == "gemma4"
    merges = _listed(metadata) if is_listed else map(list, _merges_of(vocabulary, scores, own))
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _model(vocabulary, merges) | {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True},
    }


_MODELS = {"gpt2": _bpe, "llama": _sentencepiece, "gemma4": _sentencepiece}


def _listed(metadata: Mapping[str, Any]) -> list[list[str]]:
    return [[left, right] for left, _, right in (merge.partition(" ") for merge in _list(metadata, "merges", str))]


def _merges_of(vocabulary: Mapping[str, int], scores: list[float], pieces: set[str]) -> Iterator[tuple[str, str]]:
    """All merges of two pieces into one, best piece first; ties are ordered as by Hugging Face's converter."""
    ways = [
        (-scores[index], -cut, cut - len(piece), index, vocabulary[piece[:cut]], piece[:cut], piece[cut:])
        for piece, index in vocabulary.items()
        if piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    for way in sorted(ways):
        yield way[-2:]


def _model(vocabulary: dict[str, int], merges: Iterable[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
        **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
        "vocab": vocabulary,
        "merges": list(merges),
    }


def _vocabulary(tokens: list[str], types: list[int]) -> dict[str, int]:
    """The vocabulary without padding entries."""
    return {text: index for index, text in enumerate(tokens) if types[index] != _UNUSED}


def _added_ids(tokens: list[str], types: list[int]) -> list[int]:
    return [index for index in range(len(tokens)) if types[index] in (_UNKNOWN, _CONTROL, _USER_DEFINED)]


def _added(index: int, text: str, kind: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": text} | flags | {"special": kind != _USER_DEFINED}


def _around(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any] | None:
    """Return the tokens that are added at both ends of every text."""
    is_llama = (kind := metadata.get("tokenizer.ggml.model")) == "llama"
    rules = splits().get(str(metadata.get("tokenizer.ggml.pre")))
    adds_bos = kind in ("llama", "gemma4") or (rules is not None and rules.begins_with_bos)
    parts: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    used: dict[str, Any] = {}
    for key, default, at in (("bos", adds_bos, 0), ("eos", False, 1)):
        index = _id(metadata, f"{key}_token_id", len(tokens))
        if index is None and is_llama:
            index = {"bos": 1, "eos": 2}[key] if len(tokens) > 2 else None
        if index is None or not metadata.get(f"tokenizer.ggml.add_{key}_token", default):
            continue
        text = tokens[index]
        used[text] = {"id": text, "ids": [index], "tokens": [text]}
        parts.insert(at * len(parts), {"SpecialToken": {"id": text, "type_id": 0}})
    if not used:
        return None
    return {
        "type": "TemplateProcessing",
        "single": parts,
        "pair": [*parts, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": used,
    }


def _id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    """A token's id, if the file names one. Raises GgufError if it is out of range."""
    index = metadata.get(f"tokenizer.ggml.{name}")
    if index is None or index == 0xFFFFFFFF or index == -1:
        return None
    if type(index) is not int or not 0 <= index < count:
        raise GgufError(f"tokenizer.ggml.{name} = {index!r:.40} is none of the {count} tokens")
    return index


def _list(metadata: Mapping[str, Any], name: str, kind: type, *, under: str = "tokenizer.ggml") -> list[Any]:
    """A list of values of one type; empty if absent."""
    values = metadata.get(f"{under}.{name}", [])
    if not isinstance(values, list) or not all(type(value) is kind for value in values[:1]):
        raise GgufError(f"{under}.{name} is no list of {kind.__name__}")
    return values
