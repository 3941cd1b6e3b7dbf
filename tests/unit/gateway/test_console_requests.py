"""The console's page of a request: its parts, the longest one, and sentences."""

# ruff: noqa: E501 - scripts of another language

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from tests.console.logic import evaluate

TRANSFER = {
    "verified_ms": 70.0,
    "transfer_ms": 50.0,
    "blocks": 14,
    "bytes": 1_032_192,
    "reused_blocks": 0,
    "push_ms": 2.3,
    "late_push_ms": 2.3,
}


def attempt(**changes: Any) -> dict[str, Any]:
    made = {
        "attempt": 1,
        "placement": {"reason": "load", "costs": {"predicted_ms": 59.3}, "decode": ["decode-0-gpu7-3fa29c"], "prefill": "prefill-0-gpu7-3fa29c"},
        "began_ms": 2.0, "published_ms": 3.0, "claimed_ms": 5.0, "claimed_by": "prefill-0-gpu7-3fa29c", "worker_queue_ms": 1.0, "prefill_ms": 54.0,
        "first_token_ms": 62.0, "decoder": "decode-0-gpu7-3fa29c", "transfer": TRANSFER, "ended_ms": 820.0, "outcome": "ok",
    }  # fmt: skip
    return made | changes


def request(*attempts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    made = {
        "request_id": "r", "status": "length", "detail": "", "submitted_ms": 1.5, "total_ms": 820.0, "ttft_ms": 62.0, "prompt_tokens": 220,
        "cached_tokens": 0, "completion_tokens": 80, "frame_ms": [62.0, 400.0, 820.0], "ahead": 0, "attempts": attempts,
    }  # fmt: skip
    return made | changes


def parts(detail: dict[str, Any]) -> Any:
    return evaluate(
        f"""
    const {{ longest, predictionWords, rowsOf, whereItWent }} = await at("frame/parts.js");
    const detail = {json.dumps(detail)};
    const rows = rowsOf(detail);
    out({{ rows: rows.map(({{ label, from, to, aside }}) => [label, from, to, Boolean(aside)]), slow: longest(rows)?.label, late: longest(rows, detail.ttft_ms)?.label,
      words: whereItWent(detail).replaceAll("\\u00a0", " "), notes: rows.filter((row) => row.aside).map((row) => row.note), predicted: detail.attempts.map(predictionWords) }});"""
    )


def test_the_longest_part_is_found_and_the_sentence_begins_with_it() -> None:
    found = parts(request(attempt()))
    assert (found["slow"], found["late"]) == ("decode", "prefill")
    assert found["words"] == "92 % decode: 80 tokens, 9.59 ms each. 7 % prefill: 220 tokens, none cached."
    assert found["predicted"] == ["59.3 ms to the first token; it took 60.0 ms"]
    assert found["notes"] == [
        "14 blocks (1.0 MB) went from prefill-0 to decode-0. Copying took 2.30 ms, after the prompt was computed."
    ]


def test_parts_follow_each_other_without_gaps_also_where_no_worker_was_there() -> None:
    lost = attempt(ended_ms=100.0, outcome="worker lost")
    late = attempt(
        attempt=2,
        began_ms=700.0,
        published_ms=701.0,
        claimed_ms=702.0,
        first_token_ms=None,
        worker_queue_ms=None,
        prefill_ms=None,
        transfer=None,
        ended_ms=None,
    )
    found = parts(request(lost, late, status="running", total_ms=790.0, frame_ms=[62.0, 90.0]))
    own = [row for row in found["rows"] if not row[3]]
    assert [(before[2], after[1]) for before, after in pairwise(own) if before[2] != after[1]] == []
    assert (own[0][1], own[-1][:3]) == (0, ["prefill", 702, 790])
    assert found["slow"] == "no worker"
    assert found["words"].startswith("76 % no worker: none could take it. ")


def test_what_was_hidden_or_there_already_is_said_of_the_hand_over() -> None:
    moved = evaluate(
        f"""
    const {{ movedWords }} = await at("frame/parts.js");
    const moved = (changes) => movedWords({{ ...{json.dumps(attempt())}, transfer: {{ ...{json.dumps(TRANSFER)}, ...changes }} }});
    out([moved({{ reused_blocks: 2, late_push_ms: 0 }}), moved({{ reused_blocks: 1, late_push_ms: 1 }}), moved({{ blocks: 0, reused_blocks: 3 }}), moved({{ push_ms: null, late_push_ms: null }})]);"""
    )
    begins = "14 blocks (1.0 MB) went from prefill-0 to decode-0"
    assert moved == [
        f"{begins}; 2 more were there already. Copying took 2.30 ms, all of it while the prompt was still computed.",
        f"{begins}; 1 more was there already. Copying took 2.30 ms, 1.00 ms of it after the prompt was computed.",
        "Nothing had to be moved: decode-0 had all 3 blocks.",
        f"{begins}.",
    ]


def test_names_are_told_without_what_all_have() -> None:
    found = evaluate(
        """
    const { distinct, shortName } = await at("frame/names.js");
    const names = ["decode-0-gpu7-3fa29c", "decode-0-my-host-3fa29d", "decode-gpu7-aaaaaa", "decode-gpu7-bbbbbb", "mine"];
    out([names.map(shortName), [...distinct(names).values()].map(({ short, host }) => [short, host])]);"""
    )
    assert found[0] == ["decode-0", "decode-0", "decode", "decode", "mine"]
    assert found[1] == [
        ["decode-0", "gpu7"],
        ["decode-0", "my-host"],
        ["decode aaaaaa", "gpu7"],
        ["decode bbbbbb", "gpu7"],
        ["mine", ""],
    ]
