"""The tokenizer inside a GGUF file: the same ids, words, ends and chats as the folder that it was made from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.answers.tokenizer import ChatTokenizer
from gateway.request.defaults import sampling_defaults
from modelfiles.files import read_file, read_json
from modelfiles.gguf import GgufError
from modelfiles.splits import splits
from modelfiles.tokenizer import generation_config, tokenizer_json
from tests.examples import examples
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
@examples(60)
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


@pytest.mark.parametrize(
    ("tokens", "named", "ends"),
    [
        (["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"], {"eos": 2}, {0, 1, 2}),  # Llama 3.1
        (["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], {"eos": 0, "eot": 2}, {0, 1, 2}),
        (["<|end_of_text|>", "<|eom|>", "<|eot|>"], {"eos": 2}, {0, 1, 2}),  # Llama 4
        (["<eos>", "<|tool_response>", "<turn|>"], {"eos": 2}, {0, 1, 2}),  # Gemma 4
        (["<|endoftext|>", "<|user|>", "<|observation|>"], {"eos": 0, "eot": 1, "eom": 2}, {0, 1, 2}),  # GLM 4.5
        (["<|endoftext|>", "<|im_end|>", "<|eom_id|>"], {"eos": 0, "eot": 1, "eom": 1}, {0, 1}),
    ],
)
def test_an_answer_ends_where_its_makers_end_it(tokens: list[str], named: dict[str, int], ends: set[int]) -> None:
    file: dict[str, object] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3] * len(tokens)}
    file |= {f"tokenizer.ggml.{name}_token_id": index for name, index in named.items()}
    assert set(generation_config(file)["eos_token_id"]) == ends


def test_what_the_makers_want_is_the_default(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "qwen3")
    told = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.5, "mirostat": 2}
    file = write(folder, tmp_path / "model.gguf", "qwen2", **{f"general.sampling.{name}": told[name] for name in told})
    assert sampling_defaults(read_json(file, "generation_config.json")) == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.5,
    }
