# mypy: allow-untyped-calls
"""Vectors and weights of tokens are those of transformers and plain torch: ColBERT, PyLate, bge-m3."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import linear, normalize, relu

from engine.pooling.engine import PoolingEngine, PoolingInput
from modelfiles.pooling import CLASSIFY_TOKENS, EMBED, LEXICAL, MAXSIM, TOKENS, PoolingError, read_pooling
from tests.late_models import CLS, DOCUMENT, MASK, QUERY, SEP, build_colbert, build_m3, build_pylate
from tests.pooling_models import VOCAB, build_pooling_model
from tests.unit.engine.pooling.references import EXACT, changed, engine_of, inputs, reference

MARKS = [VOCAB.index(mark) for mark in ".,!?"]


def query_of(words: list[int], length: int = 12) -> list[int]:
    found = [CLS, QUERY, *words, SEP]
    return found + [MASK] * (length - len(found))


def document_of(words: list[int]) -> list[int]:
    return [CLS, DOCUMENT, *words, SEP]


QUERIES = [query_of(words) for words in ([6, 7], [8], [9, 10, 11, 12], [9, 10, 11, 12, 13, 14, 15, 16, 17])]
DOCUMENTS = [
    document_of(words)
    for words in ([6, MARKS[0]], [7, 8, MARKS[1], 30, 31], list(range(20, 36)), [MARKS[0]], [5, 4, 4])
]


def vectors_of(theirs: Any, product: torch.Tensor, tokens: list[int], *, is_seen: bool = False) -> torch.Tensor:
    """Each token's vector: padding is hidden from attention, and a document's punctuation has none."""
    is_query = tokens[1] == QUERY
    mask = [[int(token != MASK or is_seen or not is_query) for token in tokens]]
    with torch.no_grad():
        states = theirs(torch.tensor([tokens]), attention_mask=torch.tensor(mask)).last_hidden_state[0]
    kept = [at for at, token in enumerate(tokens) if is_query or token not in MARKS]
    return normalize(states[kept] @ product.double().T, dim=-1).float()


def check(folder: Path, engine: PoolingEngine, product: torch.Tensor, *, is_seen: bool = False) -> None:
    theirs = reference(folder)
    wanted = [vectors_of(theirs, product, one, is_seen=is_seen) for one in (*QUERIES, *DOCUMENTS)]
    asked = [PoolingInput(tokens=one, work=TOKENS) for one in (*QUERIES, *DOCUMENTS)]
    for one, found, theirs_ in zip(asked, engine.compute(asked), wanted, strict=True):
        torch.testing.assert_close(found, theirs_, **EXACT)
        [alone] = engine.compute([one])
        torch.testing.assert_close(alone, found, **EXACT)
    pairs = [(at, to) for at in range(len(QUERIES)) for to in range(len(DOCUMENTS))]
    compared = [
        PoolingInput(tokens=QUERIES[at] + DOCUMENTS[to], work=MAXSIM, second=len(QUERIES[at])) for at, to in pairs
    ]
    [plain, *scores] = engine.compute([asked[5], *compared])
    torch.testing.assert_close(plain, wanted[5], **EXACT)
    for (at, to), found in zip(pairs, scores, strict=True):
        products = wanted[at] @ wanted[len(QUERIES) + to].T
        torch.testing.assert_close(found, products.max(1).values.sum().view(1, 1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("is_seen", [False, True])
def test_colbert_is_bert_with_padded_queries_and_a_product(is_seen: bool, tmp_path: Path) -> None:
    folder = build_colbert(tmp_path, attend_to_mask_tokens=is_seen)
    engine = engine_of(folder)
    product = load_file(folder / "model.safetensors")["linear.weight"]
    assert read_pooling(folder).works == (TOKENS, MAXSIM)
    bert = changed(folder, architectures=["BertModel"])
    check(bert, engine, product, is_seen=is_seen)


@pytest.mark.parametrize("family", ["ModernBertModel", "BertModel"])
def test_pylates_form_is_the_same_on_any_encoder(family: str, tmp_path: Path) -> None:
    folder = build_pylate(tmp_path, family)
    check(folder, engine_of(folder), load_file(folder / "1_Dense" / "model.safetensors")["linear.weight"])


def test_a_document_of_punctuation_alone_scores_nothing(tmp_path: Path) -> None:
    engine = engine_of(build_colbert(tmp_path))
    bare = [MARKS[0], DOCUMENT, MARKS[1]]
    [rows, score] = engine.compute(
        [
            PoolingInput(tokens=bare, work=TOKENS),
            PoolingInput(tokens=QUERIES[0] + [MARKS[0]], work=MAXSIM, second=12),
        ]
    )
    assert len(rows) == 1  # the marker's
    assert score.shape == (1, 1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"similarity": "l2"}, "similarity = 'l2' is not computed"),
        ({"interaction": "flipr"}, "interaction = 'flipr' is not computed"),
        ({"relu": True}, "relu = True is not computed"),
        ({"dim": None}, "dim must be a number above 0"),
        ({"query_token_id": "[unused7]"}, "'.unused7.' is no token of tokenizer.json"),
        ({"query_maxlen": "long"}, "query_maxlen must be a number above 0"),
    ],
)
def test_what_colbert_does_not_compute_here_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(PoolingError, match=says):
        engine_of(build_colbert(tmp_path, **changes))


def test_colbert_without_its_metadata_or_of_another_encoder_is_refused(tmp_path: Path) -> None:
    folder = build_colbert(tmp_path)
    with pytest.raises(ValueError, match="model_type = 'xlm-roberta' is not supported"):
        engine_of(changed(folder, model_type="xlm-roberta"))
    (folder / "artifact.metadata").unlink()
    with pytest.raises(PoolingError, match=r"artifact\.metadata is missing"):
        read_pooling(folder)


def test_padding_that_windows_would_hide_everything_from_is_refused(tmp_path: Path) -> None:
    folder = build_pylate(tmp_path, query_length=40)
    with pytest.raises(ValueError, match="queries padded to 40 tokens"):
        engine_of(folder)
    assert engine_of(build_pylate(tmp_path / "seen", query_length=40, attend_to_expansion_tokens=True))
    assert engine_of(build_pylate(tmp_path / "plain", query_length=40, do_query_expansion=False))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_heads_of_m3_are_those_of_plain_torch(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = build_m3(tmp_path, colbert=16, dtype=dtype)
    engine, theirs = engine_of(folder), reference(folder)
    assert read_pooling(folder).works == (EMBED, TOKENS, CLASSIFY_TOKENS, LEXICAL)
    heads = {
        name: {key: one.double() for key, one in torch.load(folder / name, weights_only=True).items()}
        for name in ("sparse_linear.pt", "colbert_linear.pt")
    }
    texts = [[CLS, *text, SEP] for text in inputs()]
    texts[4] = [CLS, *([7, 8, 7, 0, 7, 8] * 3), SEP]  # words several times, and what is no word
    works = (EMBED, TOKENS, CLASSIFY_TOKENS, LEXICAL)
    asked = [PoolingInput(tokens=text, work=work) for text in texts for work in works]
    found = engine.compute(asked)
    for at, text in enumerate(texts):
        with torch.no_grad():
            states = theirs(torch.tensor([text])).last_hidden_state[0]
        sparse, colbert = (
            linear(states, heads[name]["weight"], heads[name]["bias"])
            for name in ("sparse_linear.pt", "colbert_linear.pt")
        )
        weights = relu(sparse[:, 0]).float()
        best = dict[int, float]()
        for token, weight in zip(text, weights.tolist(), strict=True):
            if token not in (0, 1, 2, 3) and weight > 0:
                best[token] = max(weight, best.get(token, 0.0))
        vector, tokens, each, words = found[4 * at : 4 * at + 4]
        torch.testing.assert_close(vector, normalize(states[:1], dim=-1).float(), **EXACT)
        torch.testing.assert_close(tokens, normalize(colbert[1:], dim=-1).float(), **EXACT)
        torch.testing.assert_close(each, weights[1:-1, None], **EXACT)
        wanted = torch.tensor(sorted(best.items()), dtype=torch.float32).view(-1, 2)
        torch.testing.assert_close(words, wanted, **EXACT)
    for one, together in zip(asked[16:20], found[16:20], strict=True):
        torch.testing.assert_close(engine.compute([one])[0], together, **EXACT)
    raw = torch.cat(engine.compute([PoolingInput(tokens=text, work=CLASSIFY_TOKENS, is_raw=True) for text in texts]))
    assert raw.min() < 0 < raw.max()


def test_one_head_alone_is_enough_and_another_file_changes_the_fingerprint(tmp_path: Path) -> None:
    sparse = build_m3(tmp_path / "sparse", colbert=0)
    assert read_pooling(sparse).works == (EMBED, TOKENS, CLASSIFY_TOKENS, LEXICAL)
    before = engine_of(sparse).fingerprint
    torch.save(torch.nn.Linear(32, 1).state_dict(), sparse / "sparse_linear.pt")
    assert engine_of(sparse).fingerprint != before
    (sparse / "sparse_linear.pt").unlink()
    assert read_pooling(sparse).works == (EMBED, TOKENS)


@pytest.mark.parametrize(
    ("saved", "says"),
    [
        (torch.nn.Linear(32, 2).state_dict(), "a token has one weight, not 2"),
        (torch.nn.Linear(16, 1).state_dict(), r"a weight of \[outputs, 32\] and its bias are expected"),
        ({"weight": torch.zeros(1, 32)}, "and its bias are expected"),
        (torch.nn.Linear(32, 1), "Linear makes no tensor"),
    ],
)
def test_a_head_of_another_form_is_refused(saved: Any, says: str, tmp_path: Path) -> None:
    folder = build_pooling_model(tmp_path, "XLMRobertaModel")
    torch.save(saved, folder / "sparse_linear.pt")
    with pytest.raises(PoolingError, match=says):
        read_pooling(folder)


def test_punctuation_of_the_tokenizer_is_what_documents_skip(tmp_path: Path) -> None:
    late = read_pooling(build_colbert(tmp_path)).late
    assert late is not None
    assert late.skipped == {VOCAB.index(mark) for mark in string.punctuation if mark in VOCAB} == {*MARKS}
    assert (late.query, late.document, late.padding, late.query_length, late.document_length) == (100, 101, 4, 12, 20)
