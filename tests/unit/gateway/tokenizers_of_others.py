"""Small tokenizers of the shapes that models have, with templates as theirs: what becomes a control token differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% set content = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'+ m['content'] | trim"
    " + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
# As Qwen 3's: it reads the assistant's thoughts out of the content, and asks what a user's content looks like.
QWEN3 = (
    "{% macro shown(content) %}{{ content }}{% endmacro %}"
    "{% for m in messages %}{% set content = shown(m.content) | trim %}"
    "{% if m.role == 'assistant' and '</think>' in content %}"
    "{% set thoughts = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n<think>\n' ~ thoughts ~ '\n</think>\n\n' ~ content ~ '<|im_end|>\n' }}"
    "{% elif content.startswith('<tool_response>') and content.endswith('</tool_response>') %}"
    "<|im_start|>tool\n{{ content }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Phi 4's and GLM 4's: control tokens made of the role.
PHI4 = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}<|assistant|>"

_TEXT = [
    "the quick brown fox jumps over the lazy dog, and then it thinks of the end of the day",
    "What is the capital of France? Paris. 12345 <b>bold</b> || [1, 2] {'a': \"b\"}",
    "def main():\n    return [x for x in range(10)]\n\n\n",
] * 3
_SPLIT = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _byte_level(vocab_size: int, **options: Any) -> Tokenizer:
    built = Tokenizer(models.BPE(**options))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    built.train_from_iterator(_TEXT, trainer)
    return built


def llama3() -> Tokenizer:
    built = _byte_level(400, ignore_merges=True)
    built.add_special_tokens(["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<think>"])
    built.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", built.token_to_id("<|begin_of_text|>"))]
    )
    return built


def qwen3() -> Tokenizer:
    built = _byte_level(380)
    built.normalizer = normalizers.NFC()
    built.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    names = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    built.add_tokens([AddedToken(name, normalized=False) for name in names])
    built.add_tokens(["\n\n\n", "aspirin"])  # words of the vocabulary
    return built


def phi4() -> Tokenizer:
    built = _byte_level(380)
    names = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|tool|>"]
    built.add_special_tokens([AddedToken(name, rstrip=True, normalized=False) for name in names])
    return built


def mistral() -> Tokenizer:
    """SentencePiece's BPE: one run of text, with control tokens in the vocabulary and spaces as `▁`."""
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    letters = sorted({*"▁".join(_TEXT), "\n"} - {" "})
    words = ["th", "he", "▁t", "▁th", "▁the", "in", "nd", "▁a", "▁▁"]
    pieces = [*names, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    merges = [
        ("t", "h"),
        ("h", "e"),
        ("▁", "t"),
        ("▁", "th"),
        ("▁th", "e"),
        ("i", "n"),
        ("n", "d"),
        ("▁", "a"),
        ("▁", "▁"),
    ]
    built = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    built.add_special_tokens(names)
    return built


def llama2() -> Tokenizer:
    """As converted first: a normalizer writes the `▁`, and each run between control tokens gets one."""
    built = mistral()
    built.pre_tokenizer = None  # type: ignore[assignment]
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return built


def gemma4() -> Tokenizer:
    """No `▁` is put before a text. Merges are in an order that no pieces' scores say."""
    built = mistral()
    described = json.loads(built.to_str())
    described["model"]["merges"].sort(key=lambda pair: (pair != ["▁", "a"], pair))
    described["pre_tokenizer"], described["decoder"]["decoders"] = None, described["decoder"]["decoders"][:-1]
    built = Tokenizer.from_str(json.dumps(described))
    built.normalizer = normalizers.Replace(" ", "▁")
    return built


WORDS_OF_GEMMA = ("<div>", "</div>", "<b>", "</b>", "[multimodal]", "<unused7>")


def gemma3() -> Tokenizer:
    """Markup and other words are tokens that are added, and no control tokens."""
    built = gemma4()
    built.add_tokens([AddedToken(name, normalized=False) for name in WORDS_OF_GEMMA])
    return built


def unigram() -> Tokenizer:
    """Control tokens are pieces that text could be cut into, and letters in full width become them."""
    letters = sorted({*"▁".join(_TEXT), "\n"} - {" "})
    names = ["<|im_start|>", "<|im_end|>", "<s>"]
    pieces = [("<unk>", 0.0), *((name, 0.0) for name in names), *((letter, -5.0) for letter in letters), ("▁the", -3.0)]
    built = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    built.normalizer = normalizers.NFKC()
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    built.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    built.add_special_tokens(["<unk>", *(AddedToken(name, normalized=True) for name in names)])
    return built


SHAPES = {
    "llama3": (llama3, LLAMA3),
    "qwen3": (qwen3, QWEN3),
    "phi4": (phi4, PHI4),
    "mistral": (mistral, MISTRAL),
    "llama2": (llama2, MISTRAL),
    "gemma3": (gemma3, MISTRAL),
    "gemma4": (gemma4, MISTRAL),
    "unigram": (unigram, CHATML),
}


def write_folder(folder: Path, shape: str, template: str | None = None) -> Path:
    """A model's folder with such a tokenizer and its template."""
    make, usual = SHAPES[shape]
    folder.mkdir(parents=True)
    built = make()
    built.save(str(folder / "tokenizer.json"))
    names = {token.content for token in built.get_added_tokens_decoder().values()}
    bos = next((name for name in ("<|begin_of_text|>", "<s>") if name in names), None)
    eos = "</s>" if "</s>" in names else None
    settings = {"bos_token": bos, "eos_token": eos, "chat_template": template or usual}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
