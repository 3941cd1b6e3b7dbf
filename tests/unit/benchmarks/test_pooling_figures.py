"""The figures of `benchmarks.pooling`: operations of a shape, ratios of rounds, who is skipped."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from benchmarks.pooling import beside, card, prefixes


def test_operations_of_bge_base_are_its_weights_and_attention() -> None:
    shape = card.SHAPES[0]
    weights = 12 * (4 * 768 * 768 + 2 * 768 * 3072)
    assert shape.flops(512) == 2 * weights + 12 * 4 * 768 * 512


@pytest.mark.long
def test_a_tiny_shape_has_its_figures_on_a_cpu() -> None:
    rate, encoder, share = islice(card.figures(torch.device("cpu"), quick=True), 3)
    assert rate.value > 0
    assert (encoder.name, encoder.floor) == ("bge-base: 2 x 512", pytest.approx(encoder.value / share.value))
    assert encoder.target == pytest.approx(card.TARGET * (encoder.floor or 0))


def test_a_ratio_is_the_median_of_rounds_with_the_faster_engine() -> None:
    times = {"baton": [1.0, 2.0, 1.0], "sentence_transformers": [9.0, 9.0, 9.0], "onnxruntime": [1.2, 2.2, 1.5]}
    found = {each.name: each for each in beside._results("1 x 128", times)}
    ratio = found["1 x 128: times the better"]
    assert ratio.value == pytest.approx(1.2)
    assert ratio.met
    assert found["1 x 128: times the better, least of rounds"].value == pytest.approx(1.1)
    assert found["1 x 128: onnxruntime"].value == pytest.approx(1500)


def test_another_vector_than_ours_ends_the_run() -> None:
    beside._check({"baton": [1.0, 0.0], "onnxruntime": [1.0, 0.0]})
    with pytest.raises(RuntimeError, match="onnxruntime: the cosine"):
        beside._check({"baton": [1.0, 0.0], "onnxruntime": [0.6, 0.8]})


def test_a_query_is_found_by_other_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "SHAPE", card._tiny(prefixes.SHAPE))
    found = {each.name: each.value for each in prefixes.figures(rounds=1, documents=3)}
    counts = [found[f"3 documents, {way}, found"] for way in ("each alone", "a new query", "the same query")]
    assert counts == [0, 2 * 112, 3 * 112]
    assert found["3 documents, the same query"] > 0
