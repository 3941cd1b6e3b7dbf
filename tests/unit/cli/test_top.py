"""`baton top`: the picture."""

from __future__ import annotations

from typing import Any

from cli.top.view import parse_metrics, picture, worker_row
from gateway.console.state import worker_json
from tests.fakes.workers import a_worker

ROW = {
    "worker": "a-worker-with-a-very-long-name",
    "roles": "prefill,decode",
    "status": "ready",
    "running": 3,
    "waiting": 2,
    "queued_tokens": 4096,
    "kv_used": 10,
    "kv_held": 1,
    "kv_free": 5,
    "prefill_tokens_per_s": 51234.5,
    "decode_step_ms": 0.0,
    "link_gb_per_s": 351.25,
}


def test_the_picture_fits_the_terminal() -> None:
    for columns in (20, 80, 200):
        lines = picture([ROW, ROW], ["g"], {"running": 2.0}, columns=columns)
        assert max(map(len, lines)) <= columns
        assert len(lines) == 6


def test_columns_line_up_and_unmeasured_rates_are_dashes() -> None:
    title, row = picture([ROW], [], {}, columns=500)[-2:]
    assert row.split()[:3] == ["a-worker-with-a-very-long-name", "prefill,decode", "ready"]
    assert row.split()[3:] == ["3", "2", "4096", "10", "1", "5", "51234", "-", "351.2"]
    assert len(title) == len(row)


def test_a_name_that_two_processes_have_is_shown() -> None:
    told: dict[str, Any] = worker_json(a_worker("d0", "decode"))
    assert worker_row(told)["status"] == "ready"
    row = worker_row(told | {"is_contested": True})
    assert "d0                decode         2 have it " in picture([row], [], {}, columns=500)[-1]


def test_nothing_heard_is_said() -> None:
    lines = picture([], [], {}, columns=100, refused="no answer")
    assert lines[-1] == "no worker is heard"
    assert "no answer" in lines[1]


def test_metrics_are_summed_over_labels() -> None:
    text = (
        "# HELP vllm:num_requests_running Requests in flight\n# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{model_name="a"} 2.0\nvllm:num_requests_running{model_name="b"} 3.0\n'
        'baton_request_errors_total{code="x {y} 1"} 4.0\nvllm:generation_tokens_total 1e3\nother 9\n'
    )
    assert parse_metrics(text) == {"running": 5.0, "errors": 4.0, "generation_tokens": 1000.0}
