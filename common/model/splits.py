"""How a byte-level BPE cuts a text into words, by the name that a GGUF file has for it (`tokenizer.ggml.pre`)."""

from __future__ import annotations

from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BY_CASE = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SIGNS_OR_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_LLAMA_3 = "|".join((_CONTRACTIONS, _WORDS, r"\p{N}{1,3}", _SIGNS, _SPACES))
_QWEN_2 = "|".join((_CONTRACTIONS, _WORDS, r"\p{N}", _SIGNS, _SPACES))
_QWEN_3_5 = "|".join(
    (_CONTRACTIONS, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACES)
)
_GPT_4O = "|".join((*(f"{word}{_CONTRACTIONS}?" for word in _BY_CASE), r"\p{N}{1,3}", _SIGNS_OR_SLASH, _SPACES))
_TEKKEN = "|".join((*_BY_CASE, r"\p{N}", _SIGNS_OR_SLASH, _SPACES))
_DEEPSEEK_3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES
)


def _bytes(*, words: bool) -> dict[str, Any]:
    """`words`: cut as GPT-2 did."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words}


def _split(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def _steps(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _by(*expressions: str) -> dict[str, Any]:
    return _steps(*map(_split, expressions), _bytes(words=False))


_DIGIT_BY_DIGIT = _steps({"type": "Digits", "individual_digits": True}, _bytes(words=True))
_RULES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpt-2 phi-2 mpt olmo jais trillion granite-docling roberta-bpe", _bytes(words=True)),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum", _DIGIT_BY_DIGIT),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe chatglm-bpe glm4",
        _by(_LLAMA_3),
    ),
    ("qwen2 deepseek-r1-qwen stablelm2 hunyuan megrez grok-2", _by(_QWEN_2)),
    ("qwen35", _by(_QWEN_3_5)),
    ("gpt-4o llama4 minimax-m2", _by(_GPT_4O)),
    ("tekken", _by(_TEKKEN)),
    ("deepseek-v3 hunyuan-dense", _by(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_3)),
)
PRE_TOKENIZERS = {name: rule for names, rule in _RULES for name in names.split()}
NORMALIZED = frozenset(["qwen2", "deepseek-r1-qwen", "qwen35", "stablelm2", "megrez"])
# They take a word that is a token as it is, whatever merges say, and begin every text with BOS.
READ_WHOLE_WORDS = frozenset(
    ["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"]
)
