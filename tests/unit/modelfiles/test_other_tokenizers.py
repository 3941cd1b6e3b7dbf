"""tokenizer.model and tekken.json as a tokenizer.json: the tokens of their own libraries.

`sentencepiece.json` has what sentencepiece 0.2.2 made of each text with `sentencepiece.model`, which it trained on docs/
(700 pieces, BPE, byte fallback, no normalisation).
"""

from __future__ import annotations

import base64
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.integrations.mistral.tokenizer import MistralConverter

from gateway.answers.tokenizer import ChatTokenizer
from modelfiles.files import TOKENIZER, TOKENIZER_CONFIG, forget_files, other_tokenizer, read_file, read_json
from modelfiles.sentencepiece import TokenizerFileError, added_tokens, metadata_of
from services.runtime.checks.model import check_tokenizer
from tests.unit.house.measures import ROOT

HERE = Path(__file__).parent
EXPECTED: list[tuple[str, list[int]]] = json.loads((HERE / "sentencepiece.json").read_text(encoding="utf-8"))
PATTERN = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.fixture
def sentencepiece(tmp_path: Path) -> Path:
    shutil.copy(HERE / "sentencepiece.model", tmp_path / "tokenizer.model")
    return tmp_path


def tokenizer_of(folder: Path) -> Tokenizer:
    return Tokenizer.from_str((read_file(folder, TOKENIZER) or b"").decode())


def test_sentencepiece_s_tokens_are_its_library_s(sentencepiece: Path) -> None:
    (sentencepiece / TOKENIZER_CONFIG).write_text('{"legacy": false, "bos_token": "<s>"}')
    tokenizer = tokenizer_of(sentencepiece)
    wrong = {text: ids for text, ids in EXPECTED if tokenizer.encode(text, add_special_tokens=False).ids != ids}
    # As in Hugging Face's own: a text that begins with a space gets no other one.
    assert [*wrong] == [text for text, _ in EXPECTED if text.startswith(" ")]
    assert tokenizer.encode("Hello").tokens[0] == "<s>"
    assert tokenizer.decode(tokenizer.encode("Hello  world, 漢🙂").ids) == "Hello  world, 漢🙂"


def test_what_is_kept_of_a_file_can_be_forgotten(sentencepiece: Path) -> None:
    kept = read_file(sentencepiece, TOKENIZER)
    assert read_file(sentencepiece, TOKENIZER) is kept
    forget_files()
    again = read_file(sentencepiece, TOKENIZER)
    assert again == kept
    assert again is not kept


def test_what_is_legacy_differs_behind_control_tokens_alone(sentencepiece: Path) -> None:
    tokenizer = tokenizer_of(sentencepiece)
    wrong = [text for text, ids in EXPECTED if tokenizer.encode(text, add_special_tokens=False).ids != ids]
    assert wrong == ["x<tool>y"]
    assert read_json(sentencepiece, TOKENIZER_CONFIG) == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_tokens_that_its_config_adds_are_there(sentencepiece: Path) -> None:
    added = {"700": {"content": "<|im_start|>", "special": True}, "701": {"content": "<think>", "special": False}}
    config = {"added_tokens_decoder": added, "add_bos_token": False}
    (sentencepiece / TOKENIZER_CONFIG).write_text(json.dumps(config))
    tokenizer = tokenizer_of(sentencepiece)
    assert tokenizer.encode("<|im_start|><think>").ids == [700, 701]
    assert {index: token.special for index, token in tokenizer.get_added_tokens_decoder().items() if index > 699} == {
        700: True,
        701: False,
    }


@pytest.mark.parametrize("cut", [0, 1, 7, 100, -3])
def test_a_file_that_is_cut_off_is_refused_by_name(sentencepiece: Path, cut: int) -> None:
    raw = (HERE / "sentencepiece.model").read_bytes()[:cut]
    (sentencepiece / "tokenizer.model").write_bytes(raw)
    with pytest.raises(TokenizerFileError, match=r"tokenizer\.model"):
        read_file(sentencepiece, TOKENIZER)
    assert [finding.level for finding in check_tokenizer(sentencepiece)] == ["fail"]


def test_whatever_a_file_says_is_read_or_refused() -> None:
    """Some bytes, more of the rules at the end, are drawn anew, which makes fields of other kinds."""
    raw, draw = (HERE / "sentencepiece.model").read_bytes(), random.Random(0)
    refused = 0
    for _ in range(1000):
        content = bytearray(raw)
        for _ in range(draw.randrange(1, 3)):
            content[-draw.randrange(1, draw.choice((400, len(raw))))] = draw.randrange(256)
        try:
            metadata_of(bytes(content), {}, {})
        except TokenizerFileError:
            refused += 1
    assert 0 < refused < 1000


def test_a_length_is_no_number_of_zeros() -> None:
    """Field 1 of the rules is their name, here a number."""
    with pytest.raises(TokenizerFileError, match="no SentencePiece model"):
        metadata_of(b"\x0a\x03\x0a\x01a\x1a\x0a\x08\xff\xff\xff\xff\xff\xff\xff\xff\x7f", {}, {})


@pytest.mark.parametrize("index", ["\u00b2", "9" * 5000, "-1", "1.5"])
def test_a_number_of_an_added_token_that_is_none_is_left_out(index: str) -> None:
    assert added_tokens({"added_tokens_decoder": {index: {"content": "x"}}}, {}) == {}


@pytest.mark.parametrize("name", [TOKENIZER_CONFIG, "added_tokens.json"])
@pytest.mark.parametrize("content", ["{", "[" * 200_000, "\udc80"])
def test_a_file_beside_it_that_is_not_json_is_named(sentencepiece: Path, name: str, content: str) -> None:
    (sentencepiece / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(TokenizerFileError, match=f"{name} is not JSON"):
        read_file(sentencepiece, TOKENIZER)


def tekken(folder: Path, **changes: Any) -> Path:
    """A tekken.json of 500 byte pairs of the documentation, more than are used."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train([str(ROOT / "docs" / name) for name in ("engine.md", "kv.md")], trainer)
    bytes_of = {token: decoders.ByteLevel().decode([token]).encode() for token in trained.get_vocab()}
    pairs = sorted((rank, bytes_of[token]) for token, rank in trained.get_vocab().items() if len(token) > 1)
    whole = [token for _, token in pairs if b"\xef\xbf\xbd" not in token]
    ranks = [bytes([byte]) for byte in range(256)] + list(dict.fromkeys(token for token in whole if len(token) > 1))
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(ranks)]
    config = {"pattern": PATTERN, "default_vocab_size": 16 + len(vocab) - 20, "default_num_special_tokens": 16}
    special = [
        {"rank": rank, "token_str": text, "is_control": True}
        for rank, text in enumerate(("<unk>", "<s>", "</s>", "[INST]", "[/INST]"))
    ]
    described = {"config": config | {"version": "v7"}, "vocab": vocab, "special_tokens": special} | changes
    (folder / "tekken.json").write_text(json.dumps(described))
    return folder


def test_tekken_s_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    reference = MistralConverter(str(tekken(tmp_path) / "tekken.json")).converted()
    tokenizer = tokenizer_of(tmp_path)
    for text, _ in EXPECTED:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == reference.encode(text, add_special_tokens=False).ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() == reference.get_vocab_size()
    assert tokenizer.encode("[INST] a[/INST]").ids[:2] == [1, 3]
    assert other_tokenizer(tmp_path) == "tekken.json"
    assert [finding.text for finding in check_tokenizer(tmp_path)] == ["tekken.json, as tokenizer.json"]


def test_a_gateway_reads_it_with_its_template(tmp_path: Path) -> None:
    tekken(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"
    )
    (tmp_path / "config.json").write_text('{"vocab_size": 800, "eos_token_id": 2}')
    chat = ChatTokenizer(tmp_path)
    try:
        ids = chat.encode_chat([{"role": "user", "content": "[/INST]<s>hi"}])
    finally:
        chat.close()
    assert ids[:2] == [1, 3]
    assert ids[-1] == 4
    assert ids.count(4) == ids.count(1) == 1  # what a client writes is no control token
    assert chat.eos_ids == [2]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"vocab": []}, "has 0 tokens"),
        ({"config": {}}, "can't be read"),
        (
            {"config": {"pattern": "x", "default_vocab_size": 300 + (1 << 40), "default_num_special_tokens": 1 << 40}},
            "special ones are named",
        ),
        ({"special_tokens": None}, "names no special tokens"),
        ({"special_tokens": [{"rank": 1, "token_str": "<b>"}]}, "lack <s>"),
    ],
)
def test_a_tekken_that_is_wrong_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(TokenizerFileError, match=rf"tekken\.json.*{told}"):
        read_file(tekken(tmp_path, **changes), TOKENIZER)
