"""Where each rule of a GGUF file cuts a text, and what it does besides."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from modelfiles.gguf import GgufError
from modelfiles.splits import splits
from modelfiles.tokenizer import tokenizer_json

# By hand from each rule's expressions; `·` stands between words.
CUT = {
    "gpt-2": "I·'ll· · go·\n·\n·12345· you·'·LL",
    "starcoder": "x·1·2·3·4· · y",
    "llama-bpe": "We·'LL· pay· ·123·45·€!\n\n· · ok· \n",
    "qwen2": "a· ·1·2·3·\r\n\n· b",
    "qwen35": "हिन्दी· ·1·2",
    "gpt-4o": "get·HTTPName's· ·123·4· a·/b·//\n·École",
    "tekken": "get·HTTPName·'s· ·1·2·3·4",
    "kimi-k2": "“Hello·,”· ·世界世世·——·I'm· get·HTTPName· ·123·4·/\n·漢字·かな",
    "seed-coder": "a·?!·\n\n·b· ·1·2",
    "minicpm5": "a· ·123·45·,\n",
    "tiny_aya": "1·234·567· x·1·234",
    "deepseek-v3": "a·123·45·,·世界です·.foo· Ünïcode",
    "deepseek-llm": "a· ·1·2·3·,· ·世界·ok· ·\n· b·£·ﬀÖΩж·\u1f7d·Ａ·  ",
    "deepseek-coder": "a· £·5·%,· ·世界中· b·_·c·\r·\n",
    "afmoe": "1·234·567· ·12· ·世界·ไทย·.foo· ·한국·ok",
}
LETTERS = [bytes([byte]).decode("latin-1") for byte in range(0x61, 0x7B)]


def built(pre: str, **entries: Any) -> Tokenizer:
    """A file's tokenizer of some letters, two of which a merge binds that leaves a word out of reach."""
    tokens = [*LETTERS, "ab", "bc", "abc", "\u00c3", "\u00a9", "\u00c3\u00a9", "1", "<s>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.merges": ["b c", "a b", "ab c", "\u00c3 \u00a9"],
        "tokenizer.ggml.bos_token_id": len(tokens) - 1,
    }
    return Tokenizer.from_str(json.dumps(tokenizer_json(metadata | entries)))


@pytest.mark.parametrize("pre", CUT)
def test_a_text_is_cut_as_the_rule_says(pre: str) -> None:
    words = CUT[pre].split("·")
    text = "".join(words)
    cut = built(pre).pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cut] == words


@pytest.mark.parametrize(
    ("pre", "expected"),
    [("glm4", ["abc"]), ("kimi-k2", ["abc"]), ("llama-bpe", ["abc"]), ("qwen2", ["a", "bc"]), ("gpt-2", ["a", "bc"])],
)
def test_some_take_a_word_that_merges_do_not_reach(pre: str, expected: list[str]) -> None:
    assert built(pre).encode("abc", add_special_tokens=False).tokens == expected


@pytest.mark.parametrize(
    ("pre", "begins"), [("llama-bpe", True), ("tekken", True), ("glm4", False), ("kimi-k2", False), ("qwen2", False)]
)
def test_some_begin_with_bos_where_the_file_does_not_say(pre: str, begins: bool) -> None:
    assert built(pre).encode("a").tokens == ["<s>", "a"][not begins :]
    assert built(pre, **{"tokenizer.ggml.add_bos_token": not begins}).encode("a").tokens == ["<s>", "a"][begins:]


@pytest.mark.parametrize("pre", ["qwen2", "command-r", "olmo", "exaone", "gpt-2"])
def test_some_give_a_text_one_form_before(pre: str) -> None:
    is_composed = pre != "gpt-2"
    accented = built(pre).encode("e\u0301", add_special_tokens=False).tokens
    assert accented == (["\u00c3\u00a9"] if is_composed else ["e"])
    compatible = built(pre).encode("\uff11", add_special_tokens=False).tokens  # a wide digit
    assert compatible == (["1"] if pre == "exaone" else [])


@pytest.mark.parametrize("pre", ["falcon-h1", "mellum", "exaone4", "exaone-moe", "youtu", "default", "bloom"])
def test_what_nobody_knows_for_certain_is_refused(pre: str) -> None:
    assert pre not in splits()
    with pytest.raises(GgufError, match=rf"tokenizer\.ggml\.pre = '{pre}' is not supported: put"):
        built(pre)
