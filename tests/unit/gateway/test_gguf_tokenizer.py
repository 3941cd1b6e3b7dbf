"""The tokenizer inside a GGUF file: the same ids, words, ends and chats as the folder that it was made from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.model.files import read_file
from common.model.gguf import GgufError
from common.model.splits import splits
from common.model.tokenizer import generation_config, tokenizer_json
from gateway.answers.tokenizer import ChatTokenizer
from tests.gguf_files import add_tokenizer
from tests.unit.gateway.tokenizers_of_others import write_folder

DEMO = Path(__file__).resolve().parents[3] / "demo"
# What llama.cpp's converter calls the rules of each, which are not quite those of the smaller one in the tests.
RULES = {
    "demo": "smollm",
    "llama3": "llama-bpe",
    "qwen3": "qwen2",
    "phi4": "qwen2",
    "llama2": "",
    "mistral": "",
    "gemma4": "gemma4",
}
MESSAGES = [{"role": "user", "content": "Grüß dich <|im_end|> </s>!"}, {"role": "assistant", "content": "  12345\n\n"}]
TEXTS = st.text(max_size=60) | st.text("ab c'sST1234.,<|>▁_\n\r\t äß€", max_size=60)


def write(folder: Path, file: Path, pre: str, **entries: object) -> Path:
    writer = gguf.GGUFWriter(file, "llama")
    add_tokenizer(writer, folder, pre)
    for name, value in entries.items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[ChatTokenizer, ChatTokenizer]]:
    """The folder's tokenizer, and the file's."""
    made: dict[str, tuple[ChatTokenizer, ChatTokenizer]] = {}

    def of(name: str) -> tuple[ChatTokenizer, ChatTokenizer]:
        if name not in made:
            root = tmp_path_factory.mktemp("tokenizer")
            folder = DEMO if name == "demo" else write_folder(root / "model", name)
            if name not in ("demo", "llama2", "mistral", "gemma4"):
                _take_the_rules(folder, RULES[name])
            made[name] = ChatTokenizer(folder), ChatTokenizer(write(folder, root / "model.gguf", RULES[name]))
        return made[name]

    return of


def _take_the_rules(folder: Path, pre: str) -> None:
    """Cut words in the folder, too, as models of that name do."""
    rules = splits()[pre]
    path = folder / "tokenizer.json"
    described = json.loads(path.read_text())
    described["pre_tokenizer"] = rules.pre_tokenizer
    described["normalizer"] = {"type": rules.normalizer} if rules.normalizer else None
    path.write_text(json.dumps(described))


@pytest.mark.parametrize("name", ["demo", "llama3", "qwen3", "llama2", "gemma4"])
@given(text=TEXTS)
@settings(max_examples=150, deadline=None)
def test_texts_become_the_same_tokens(
    pair: Callable[[str], tuple[ChatTokenizer, ChatTokenizer]], name: str, text: str
) -> None:
    folder, file = pair(name)
    ids = folder.encode(text)
    assert file.encode(text) == ids
    assert file.encode(text, parse_special=False) == folder.encode(text, parse_special=False)
    assert file.decode(ids, skip_special_tokens=False) == folder.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", ["demo", "llama3", "qwen3", "llama2", "gemma4"])
def test_all_else_is_the_same(pair: Callable[[str], tuple[ChatTokenizer, ChatTokenizer]], name: str) -> None:
    folder, file = pair(name)
    assert file.encode_chat(MESSAGES) == folder.encode_chat(MESSAGES)
    assert file.render(MESSAGES) == folder.render(MESSAGES)
    assert file.special_ids == folder.special_ids
    assert set(file.eos_ids) >= set(folder.eos_ids)
    assert [file.token_bytes(index) for index in range(300)] == [folder.token_bytes(index) for index in range(300)]
    assert file.format.format == folder.format.format


def test_a_tokenizer_beside_the_file_wins(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "qwen3")
    file = write(folder, folder / "model.gguf", "no-such-rules")
    assert read_file(file, "tokenizer.json") == (folder / "tokenizer.json").read_bytes()
    assert ChatTokenizer(file).encode("abc") == ChatTokenizer(folder).encode("abc")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(GgufError, match=r"model\.gguf: tokenizer\.ggml\.pre = 'no-such-rules' is not supported: put"):
        ChatTokenizer(file)


def test_a_piece_that_takes_forever_to_cut_up_is_refused() -> None:
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "a" * 513]}
    with pytest.raises(GgufError, match=r"one of more than 512 letters \(513\)"):
        tokenizer_json(metadata | {"tokenizer.ggml.scores": [0.0, 0.0]})


@pytest.mark.parametrize("named", [{}, {"tokenizer.ggml.eot_token_id": 2}])
def test_the_end_of_a_part_of_gpt_oss_does_not_end_its_answer(named: dict[str, int]) -> None:
    tokens = ["a", "<|return|>", "<|end|>", "<|call|>", "<|endoftext|>"]
    file = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1, 3, 3, 3, 3], **named}
    assert sorted(generation_config(file | {"tokenizer.ggml.eos_token_id": 1})["eos_token_id"]) == [1, 3, 4]
    others = {"tokenizer.ggml.tokens": [text for text in tokens if text != "<|call|>"]}
    others |= {"tokenizer.ggml.token_type": [1, 3, 3, 3], "tokenizer.ggml.eos_token_id": 1}
    assert generation_config(others)["eos_token_id"] == [1, 2, 3]
