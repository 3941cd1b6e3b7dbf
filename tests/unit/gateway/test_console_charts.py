"""The console's charts and the planner's sentences, evaluated outside a browser."""

# ruff: noqa: E501 - scripts of another language

from __future__ import annotations

import pytest

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


def test_nothing_is_drawn_across_a_time_of_which_nothing_is_known() -> None:
    found = evaluate(
        """
    const { dotsOf, lineOf, nearest, stepsOf } = await at("frame/chart.js");
    const scale = { x: (value) => value, y: (value) => value };
    const data = { at: [0, 10, 20, 30, 40, 50, 60, 70, 80], step_s: 10 };
    const column = [1, 2, null, 4, null, null, null, 8, 9];
    out({ line: lineOf(data, column, scale), dots: dotsOf(data, column, scale), steps: stepsOf(data, column, scale), nearest: [-5, 14, 26, 999].map((time) => nearest(data, time)) });"""
    )
    assert found["line"] == "M5.0 1.0L15.0 2.0M75.0 8.0L85.0 9.0"
    assert found["dots"] == "M35.0 4.0h.01"
    assert found["steps"] == "M0.0 1.0H10.0L10.0 2.0H20.0M30.0 4.0H40.0M70.0 8.0H80.0L80.0 9.0H90.0"
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


def test_a_hosted_model_has_a_state_and_an_order() -> None:
    found = evaluate(
        """
    const { stateOf, aliasRows, fileRows } = await at("pages/models.js");
    const state = (status, reason, workers = []) => stateOf({ hosted: status && { status, reason } }, workers);
    out({
      states: [state("", ""), state("", "", [1]), state("ready", "", [1, 2]), state("loading", ""), state("unloaded", ""), state("parked", ""), state("failed", "no room"), state("strange", "")],
      aliases: aliasRows([
        { name: "chat", source: "made", shares: [{ model: "old", percent: 95 }, { model: "new", percent: 5 }, { model: "new", tenant: "acme" }, { model: "new", header: "x-canary", value: "yes" }] },
        { name: "gpt", source: "configured", shares: [{ model: "old", percent: 100 }] }]).map(([, , cells]) => cells),
      files: fileRows([{ name: "org/a", bytes: 2e9, shared_bytes: 1e9, is_whole: true, is_served: true }, { name: "org/b", bytes: 5e6, shared_bytes: 0, is_whole: false, is_served: false }]).map(([, , cells]) => cells),
    });"""
    )
    assert found["states"] == [
        ["no worker serves it", ""],
        ["on 1 worker", ""],
        ["loaded, on 2 workers", "unload"],
        ["loading", ""],
        ["not loaded", "load"],
        ["asleep, its weights are in memory", "load"],
        ["could not be loaded: no room", "load"],
        ["strange", ""],
    ]
    assert found["aliases"] == [
        ["chat", "old 95 %, new 5 %, new for tenant acme, new for x-canary: yes", "while running"],
        ["gpt", "old", "by settings"],
    ]
    assert found["files"] == [["org/a", "2.0 GB", "1.0 GB", "served"], ["org/b", "5.0 MB", "–", "not whole"]]


def test_workers_at_hosts_stand_beside_those_that_are_wanted() -> None:
    found = evaluate(
        """
    const { hostedWords } = await at("pages/models.js");
    const workers = { decode: { running: 1, wanted: 2 }, prefill: { running: 2, wanted: null } };
    out([hostedWords({ hosted: { workers } }), hostedWords({ hosted: { workers: {} } }), hostedWords({ hosted: null })]);"""
    )
    assert found == ["1 decode worker, 2 wanted; 2 prefill workers", "", ""]


def test_a_model_is_told_by_its_files_and_its_workers() -> None:
    found = evaluate(
        """
    const { factsOf } = await at("pages/models.js");
    const worker = { kv_blocks: 100, block_bytes: 74000, kv_dtype: "bfloat16" };
    const facts = (model, workers) => Object.fromEntries(factsOf({ vocab_size: 4096, ...model }, workers));
    out([facts({ architecture: "LlamaForCausalLM", dtype: "bfloat16", quantised: "awq", max_model_len: 2048, can_chat: true, calls: "hermes", reasoning: "" }, [worker, worker]), facts({}, [])]);"""
    )
    assert found[0] == {
        "at hosts": "", "architecture": "LlamaForCausalLM", "saved as": "bfloat16, quantised: awq", "context": "2048 tokens, prompt and answer together", "vocabulary": "4096 tokens",
        "KV cache": "15 MB on 2 workers, in bfloat16", "chat": "yes", "tool calls": "hermes", "thoughts": "none apart from the answer",
    }  # fmt: skip
    assert (found[1]["saved as"], found[1]["KV cache"], found[1]["chat"]) == (
        "",
        "",
        "no chat template: it continues text",
    )


def test_texts_are_compared_whatever_the_length_of_their_vectors() -> None:
    found = evaluate(
        """
    const { linesOf, matrixOf } = await at("pages/compare.js");
    out([linesOf(" one\\n\\ntwo \\n"), matrixOf([[3, 0], [0, 2], [1, 1], [0, 0]])]);"""
    )
    assert found[0] == ["one", "two"]
    half = 0.5**0.5
    wanted = [[1, 0, half, 0], [0, 1, half, 0], [half, half, 1, 0], [0, 0, 0, 0]]
    assert found[1] == [pytest.approx(row) for row in wanted]


def test_a_model_of_vectors_is_told_by_what_it_makes() -> None:
    found = evaluate(
        """
    const { factsOf } = await at("pages/models.js");
    const facts = (model) => Object.fromEntries(factsOf({ vocab_size: 10, can_chat: false, max_model_len: 512, ...model }, []).filter(([, value]) => value));
    out([facts({ makes: "vectors", dimensions: 384, labels: 0 }), facts({ makes: "scores", dimensions: 384, labels: 3 })]);"""
    )
    assert [(one["makes"], one["context"], one.get("chat")) for one in found] == [
        ("vectors of 384 features", "512 tokens", None),
        ("3 scores", "512 tokens", None),
    ]


def test_a_planners_decision_is_a_sentence() -> None:
    found = evaluate(
        """
    const { actsWords, reasonWords } = await at("pages/planner.js");
    const said = (reason, prefill = 0.1) => reasonWords({ reason, pressures: { prefill, decode: 0.2 } });
    const dry = { planner: "planner-gpu7-3fa29c", acts: false }, acting = { planner: "planner-gpu8-3fa29c", acts: true };
    out({ said: [said("no role is pressed"), said("no role is pressed", 0.7), said("both roles are pressed: only more workers help"),
        said("decode is pressed: 0.93 with 3 of 8 in time, but no prefill worker can be spared"),
        said("prefill is pressed: 1.20; with decode-1-gpu7-3fa29c 0.60, decode 0.30 to 0.45; for 3 of 10 s"), said("several models: 2 are on this bus")],
      acts: [actsWords(acting, [acting]), actsWords(dry, [dry]), actsWords(dry, [dry, acting])] });"""
    )
    assert found["said"] == [
        "Load is low: nothing to move.",
        "No role is short of workers: nothing to move.",
        "Both roles are short of workers: only more workers help.",
        "Decode is at 93 %, with 3 of 8 in time, but no prefill worker can be spared.",
        "Prefill is at 120 %: with decode-1 it would be 60 %, and decode 45 % after 30 %; a move waits until it has been so for 10 s, now 3 s.",
        "Several models: 2 are on this bus.",
    ]
    assert found["acts"] == [
        "moves workers",
        "dry run: decides, and moves no worker",
        "stands by: planner moves workers",
    ]
