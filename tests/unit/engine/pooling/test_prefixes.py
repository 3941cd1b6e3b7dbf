"""Texts that begin alike share what is computed, in a pass and between passes, and get what each gets alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kernels.native import floats
from engine.pooling import prefixes
from engine.pooling.engine import PoolingEngine, PoolingInput
from engine.pooling.prefixes import BLOCK
from tests.pooling_models import build_pooling_model
from tests.unit.engine.pooling.references import EXACT, changed, engine_of

WINDOWS = {"use_sliding_window": True, "sliding_window": 20}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "norms of heads": ("Qwen3Model", {}),
    "a window": ("MistralModel", {"sliding_window": 24, "head_dim": 16}),
    "windows by layer": (
        "Qwen3Model",
        WINDOWS | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "norms behind": ("Gemma3TextModel", {"use_bidirectional_attention": False}),
}
LONGEST = 256
BLOCK_BYTES = 4 * BLOCK * (32 + 3 * 2 * 2 * 16)  # of Qwen3Model: vectors, and layers' keys and values


def block(number: int) -> list[int]:
    return [2 + (7 * number + at) % 97 for at in range(BLOCK)]


def text(path: Sequence[int], *more: int) -> list[int]:
    return [token for number in path for token in block(number)] + list(more)


def asked(*texts: Sequence[int], **options: Any) -> list[PoolingInput]:
    return [PoolingInput(tokens=one, **options) for one in texts]


class Models:
    """A folder for each of MODELS, and what a text gets alone, where nothing is shared."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.engine = cache(self._engine)
        self.alone = cache(self._alone)

    @cache  # noqa: B019 - as short-lived as the test session
    def folder(self, name: str) -> Path:
        family, changes = MODELS[name]
        return build_pooling_model(
            self._root / name.replace(" ", "-"), family, **{"max_position_embeddings": LONGEST, **changes}
        )

    def _engine(self, name: str, is_native: bool) -> PoolingEngine:
        return engine_of(self.folder(name), prefix_bytes=0)

    def _alone(self, name: str, tokens: tuple[int, ...], work: str, is_native: bool) -> torch.Tensor:
        return self.engine(name, is_native).compute(asked(tokens, work=work))[0]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def qwen(models: Models) -> PoolingEngine:
    return engine_of(models.folder("norms of heads"))


PATHS = st.lists(st.integers(0, 1), max_size=4)
TEXTS = st.tuples(PATHS, st.integers(1, 20), st.sampled_from(["embed", "token_embed"]), st.sampled_from(["", "a"]))
PASSES = st.lists(st.lists(TEXTS, min_size=1, max_size=6), min_size=1, max_size=4)


def alike(one: Sequence[int], other: Sequence[int]) -> int:
    """The tokens of whole blocks with which both begin."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count // BLOCK * BLOCK


@pytest.mark.quick
@pytest.mark.parametrize("is_native", [True, False], ids=["kernels in C", "torch"])
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(passes=PASSES, blocks=st.sampled_from([0, 1, 3, 100]))
def test_random_trees_of_prefixes_change_no_result(
    models: Models, name: str, is_native: bool, passes: list[list[Any]], blocks: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not is_native:
            patch.setattr(floats, "is_usable", lambda: False)
        engine, before = (
            engine_of(models.folder(name), prefix_bytes=blocks * BLOCK_BYTES),
            list[tuple[str, list[int]]](),
        )
        is_native = is_native and floats.is_usable()
        for each in passes:
            inputs = [
                PoolingInput(tokens=text(path, *range(3, 3 + more)), work=work, salt=salt)
                for path, more, work, salt in each
            ]
            found = engine.compute(inputs)
            for one, rows, count in zip(inputs, found, engine.found, strict=True):
                wanted = models.alone(name, tuple(one.tokens), one.work, is_native)
                if is_native:
                    assert torch.equal(rows, wanted)
                torch.testing.assert_close(rows, wanted, **EXACT)
                others = [tokens for salt, tokens in before if salt == one.salt]
                others += [list(other.tokens) for other in inputs if other is not one and other.salt == one.salt]
                assert count <= max((alike(one.tokens, other) for other in others), default=0)
            before += [(one.salt, list(one.tokens)) for one in inputs]
            assert engine.prefixes is not None
            assert len(engine.prefixes) <= blocks


def test_texts_of_a_pass_compute_their_beginning_once(qwen: PoolingEngine) -> None:
    qwen.compute(asked(text([0, 1], 5), text([0, 1], 6, 7), text([0, 2], 5), text([3], 4), text([0])))
    assert qwen.found == [BLOCK, 2 * BLOCK, BLOCK, 0, 0], "the shortest computes what is shared, and its own last token"


def test_a_second_query_finds_what_two_documents_of_the_first_shared(qwen: PoolingEngine) -> None:
    query = [0, 1, 2]
    qwen.compute(asked(text([*query, 3], 5), text([*query, 4], 6)))
    assert qwen.found == [0, 3 * BLOCK]
    qwen.compute(asked(text([*query, 5], 5, 6), text([*query, 6], 6)))
    assert qwen.found == [3 * BLOCK, 3 * BLOCK]


def test_what_comes_once_pushes_nothing_out_and_what_comes_twice_is_kept(models: Models) -> None:
    engine = engine_of(models.folder("norms of heads"), prefix_bytes=3 * BLOCK_BYTES)
    counts = list[int]()
    for path in ([0, 1], [0, 1], [0, 1], *([number, number, number] for number in range(2, 40)), [0, 1]):
        engine.compute(asked(text(path, 5)))
        counts.append(engine.found[0])
    assert counts == [0, 0, 2 * BLOCK, *[0] * 38, 2 * BLOCK]


def test_the_longest_unused_goes_first_and_a_block_before_those_ahead_of_it(models: Models) -> None:
    engine = engine_of(models.folder("norms of heads"), prefix_bytes=4 * BLOCK_BYTES)

    def found(path: list[int]) -> int:
        engine.compute(asked(text(path, 5)))
        return engine.found[0] // BLOCK

    def keep(path: list[int]) -> None:
        engine.compute(asked(text(path, 5), text(path, 6)))

    keep([0, 1])
    keep([2, 3])
    assert found([0, 1]) == 2
    keep([4])  # in place of 3
    assert (found([0, 1]), found([4]), found([2, 3])) == (2, 1, 1)
    keep([5, 6, 7, 8, 9])
    assert found([5, 6, 7, 8, 9]) == 4, "as many of the first as there is room for"


def test_adapters_and_salts_share_nothing(qwen: PoolingEngine) -> None:
    tokens = text([0, 1], 5)
    qwen.compute([*asked(tokens, tokens, salt="a"), *asked(tokens, salt="b"), *asked(tokens)])
    assert qwen.found == [0, 2 * BLOCK, 0, 0]
    qwen.compute([*asked(tokens, salt="b"), *asked(tokens, salt="a"), *asked(tokens, salt="c")])
    assert qwen.found == [0, 2 * BLOCK, 0]
    assert qwen.prefixes is not None
    with qwen.prefixes.shared([prefixes.Beginning(tokens=tokens, salt="a", adapter="x")]) as sharing:
        assert sharing.begins == (0,)


def test_a_pass_that_fails_leaves_what_was_kept(
    models: Models, qwen: PoolingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, other = text([0, 1], 5), text([2, 3], 5)
    qwen.compute(asked(shared, shared))
    with monkeypatch.context() as patch:
        patch.setattr(prefixes.Sharing, "states", lambda *_: torch.empty(0)[1])
        with pytest.raises(IndexError):
            qwen.compute(asked(shared, other, other))
    [first, second] = qwen.compute(asked(shared, other))
    assert qwen.found == [2 * BLOCK, 0], "nothing of the pass that failed"
    for found, tokens in ((first, shared), (second, other)):
        wanted = models.alone("norms of heads", tuple(tokens), "embed", floats.is_usable())
        torch.testing.assert_close(found, wanted, **EXACT)


@pytest.mark.parametrize(
    ("family", "fields"),
    [("Qwen2Model", {"is_causal": False}), ("EuroBertModel", {}), ("Gemma3TextModel", {}), ("BertModel", {})],
    ids=["GTE-Qwen2", "EuroBERT", "EmbeddingGemma", "BERT"],
)
def test_nothing_is_shared_where_tokens_see_later_ones(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    engine = engine_of(changed(build_pooling_model(tmp_path, family), **fields))
    texts = asked(text([0, 1], 5), text([0, 1], 6, 7))
    together = [engine.compute(texts) for _ in range(3)][-1]
    assert (engine.prefixes, list(engine.found)) == (None, [0, 0])
    for one, found in zip(texts, together, strict=True):
        torch.testing.assert_close(engine.compute([one])[0], found, **EXACT)


def test_narrow_numbers_are_kept_as_they_are(models: Models) -> None:
    folder = models.folder("norms of heads")
    engine, plain = engine_of(folder, dtype="bfloat16"), engine_of(folder, dtype="bfloat16", prefix_bytes=0)
    texts = [text([0, 1, 2], *range(3, 3 + more)) for more in (1, 5, 9)]
    first, second = engine.compute(asked(*texts)), engine.compute(asked(*texts))
    assert engine.found == [3 * BLOCK] * 3
    for tokens, one, other in zip(texts, first, second, strict=True):
        [wanted] = plain.compute(asked(tokens))
        for found in (one, other):
            assert torch.nn.functional.cosine_similarity(found, wanted).item() > 0.9999
