"""What the console's charts compute, evaluated outside a browser."""

# ruff: noqa: E501 - scripts of another language

from __future__ import annotations

from tests.console.logic import evaluate


def test_an_axis_ends_at_a_round_number_and_cuts_what_is_far_above_all_others() -> None:
    found = evaluate(
        """
    const chart = await at("frame/chart.js");
    const usual = Array.from({ length: 60 }, (_, index) => 50 + index);
    out({
      steps: [0.03, 0.3, 1, 34, 100.1].map(chart.stepOf),
      usual: chart.topOf(usual), outlier: chart.topOf([...usual, 57000]), few: chart.topOf([1, 57000]), none: chart.topOf([]),
    });"""
    )
    assert found["steps"] == [0.05, 0.5, 1, 50, 200]
    assert found["usual"] == 109
    assert 109 <= found["outlier"] < 200
    assert (found["few"], found["none"]) == (57000, 0)


def test_a_line_breaks_where_nothing_is_known_and_a_lone_value_is_a_dot() -> None:
    found = evaluate(
        """
    const { lineOf, nearest } = await at("frame/chart.js");
    const scale = { x: (value) => value, y: (value) => value };
    const data = { at: [0, 10, 20, 30, 40, 50, 60, 70, 80], step_s: 10 };
    out({ path: lineOf(data, [1, 2, null, 4, null, null, null, null, 9], scale), nearest: [-5, 14, 26, 999].map((time) => nearest(data, time)) });"""
    )
    assert found["path"] == "M5.0 1.0h.01L15.0 2.0L35.0 4.0M85.0 9.0h.01"
    assert found["nearest"] == [0, 1, 2, 8]


def test_what_comes_is_joined_to_what_is_shown_and_no_longer_than_its_span() -> None:
    found = evaluate(
        """
    const { joined, smoothed } = await at("pages/overview.js");
    const old = { span: "10m", length: 3, at: [0, 2, 4], series: { good: [1, 2, 3], gone: [1, 1, 1] } };
    const news = { span: "10m", length: 3, at: [6], series: { good: [4], fresh: [9] } };
    out({ more: joined(old, news), other: joined(old, { ...news, span: "1h" }).at, first: joined(null, news).at,
      smooth: smoothed({ step_s: 2, series: { good: [0, 10, null, 2], kv: [0, 1, 0, 1] } }), coarse: smoothed({ step_s: 10, series: { good: [0, 10] } }) });"""
    )
    assert found["more"]["at"] == [2, 4, 6]
    assert found["more"]["series"] == {"good": [2, 3, 4], "gone": [1, 1, None], "fresh": [None, None, 9]}
    assert (found["other"], found["first"]) == ([6], [6])
    assert found["smooth"] == {"good": [0, 5, None, 4], "kv": [0, 1, 0, 1]}
    assert found["coarse"] == {"good": [0, 10]}
