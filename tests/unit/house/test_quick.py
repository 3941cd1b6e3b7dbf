"""Tests of `quick`: what `make test` leaves out is the cross product, and nothing is left out by mistake."""

from __future__ import annotations

from itertools import product

import pytest

from tests.quick import each_value_once, like, mark_the_others_long

SIZES, KINDS = (1, 16, 300), ("int8", "fp8", "int4", "nf4")


def _is_long(request: pytest.FixtureRequest) -> bool:
    return request.node.get_closest_marker("long") is not None


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_each_value_is_in_a_quick_case(request: pytest.FixtureRequest, size: int, kind: str) -> None:
    quick = {(1, "int8"), (16, "fp8"), (300, "int4"), (1, "nf4")}
    assert _is_long(request) == ((size, kind) not in quick)


@pytest.mark.quick(of=lambda size, kind: (kind[:2], size > 5))
@pytest.mark.parametrize(("size", "kind"), [(1, "int8"), (2, "int4"), (3, "fp8")])
def test_what_is_said_of_cases_is_in_a_quick_case(request: pytest.FixtureRequest, size: int, kind: str) -> None:
    assert _is_long(request) == (kind == "int4")


@pytest.mark.quick(first=2)
@pytest.mark.parametrize("seed", range(4))
def test_the_first_cases_are_quick(request: pytest.FixtureRequest, seed: int) -> None:
    assert _is_long(request) == (seed >= 2)


@pytest.mark.quick("llama*", "gpt_oss")
@pytest.mark.parametrize("family", ["llama", "llama 4, chunks", "gpt_oss", "gpt_oss_2"])
def test_named_cases_are_quick(request: pytest.FixtureRequest, family: str) -> None:
    assert _is_long(request) == (family == "gpt_oss_2")


def test_values_are_one_where_their_types_are_too() -> None:
    assert each_value_once([{"a": value} for value in (True, 1, 1.0, "1", 1, (1, "a"), (1, "a"), (1, "b"))]) == {
        0,
        1,
        2,
        3,
        5,
        7,
    }


def test_rows_of_a_table_count_by_their_values() -> None:
    rows = [{"size": size, "kind": kind} for size, kind in product(SIZES, KINDS)]
    chosen = [rows[at] for at in each_value_once(rows)]
    assert len(chosen) == len(KINDS)
    assert {row["kind"] for row in chosen} == set(KINDS)
    assert {row["size"] for row in chosen} == set(SIZES)


def test_a_star_stands_for_anything_and_nothing_else_does() -> None:
    assert like(["a[0]", "a.1", "ab", "b"], ["a*", "."]) == {0, 1, 2}


@pytest.mark.quick(first=1)
@pytest.mark.parametrize("case", ["here"])
def test_a_name_that_is_no_case_is_told(request: pytest.FixtureRequest, case: str) -> None:
    node = request.node
    node.own_markers = [mark for mark in node.own_markers if mark.name != "quick"] + [pytest.mark.quick("gone").mark]
    with pytest.raises(pytest.UsageError, match=r"test_a_name_that_is_no_case_is_told has no case gone"):
        mark_the_others_long([node], are_all=True)
    mark_the_others_long([node], are_all=False)
    assert _is_long(request)
