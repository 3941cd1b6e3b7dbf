"""`baton bench`: several loads, the search for the highest rate, vLLM's options, and what results become."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cli.bench.aliases import translated
from cli.bench.client import Sample
from cli.bench.compare import compared, judged
from cli.bench.files import check_writable, document, lines, metadata_of, read, table, write
from cli.bench.page import curve, page, pareto
from cli.bench.report import step_head, step_row, verdict
from cli.bench.results import Done, missed_already, summarize
from cli.bench.run import Run
from cli.bench.settings import BenchSettings
from cli.bench.steps import MAX_PROBES, PRECISION, MaxSearch, Step, of_step, seed_of, steps_of
from cli.bench.svg import Point
from common.settings import ConfigError
from services.runtime.loading import load_settings


def settings_of(*words: str) -> BenchSettings:
    arguments, _ = translated(words)
    return load_settings(BenchSettings, command="bench", arguments=arguments, environment={})


# -- steps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sweep", "expected"),
    [
        ("", [Step(3.0, 0)]),
        ("1,2.5", [Step(1.0), Step(2.5)]),
        ("rate=1:16:5", [Step(1), Step(2), Step(4), Step(8), Step(16)]),
        ("concurrency=1,8", [Step(3.0, 1), Step(3.0, 8)]),
    ],
)
def test_a_sweep_is_a_list_of_loads(sweep: str, expected: list[Step]) -> None:
    assert steps_of(BenchSettings(sweep=sweep, request_rate=3)) == expected


@pytest.mark.parametrize(
    "sweep", ["0,1", "a", "1:2", "2:1:3", "1:2:1", "1:2:65", "users=3", "concurrency=", "max=2", "max=a"]
)
def test_what_is_no_sweep(sweep: str) -> None:
    with pytest.raises(ConfigError, match="--sweep"):
        steps_of(BenchSettings(sweep=sweep))


def test_a_search_needs_an_objective_and_open_arrivals() -> None:
    with pytest.raises(ConfigError, match="objective"):
        steps_of(BenchSettings(sweep="max"))
    with pytest.raises(ConfigError, match="--max-concurrency"):
        steps_of(BenchSettings(sweep="max", ttft_slo_ms=1, max_concurrency=3))
    assert steps_of(BenchSettings(sweep="max=0.99", ttft_slo_ms=1)) == [Step()]


def test_a_step_sends_for_its_time_unless_a_number_was_given() -> None:
    long = settings_of("--sweep", "10")
    assert of_step(long, Step(10.0)).num_prompts == 150
    assert of_step(long, Step(0.1)).num_prompts == 20
    assert of_step(long, Step(0.0, 16)).num_prompts == 64
    assert of_step(settings_of("--sweep", "10", "--num-prompts", "5"), Step(10.0)).num_prompts == 5
    assert of_step(settings_of(), Step(10.0)).num_prompts == 100
    assert len({seed_of(long, index) for index in range(9)}) == 9


@pytest.mark.parametrize("capacity", [0.03, 0.9, 1.0, 6.7, 250.0])
@pytest.mark.parametrize("begin", [0.0, 0.5, 40.0])
def test_the_search_ends_just_below_the_capacity(capacity: float, begin: float) -> None:
    search, tried = MaxSearch(begin), 0
    while (rate := search.rate) is not None:
        assert search.met < rate < search.missed
        search.took(rate, met=rate <= capacity)
        tried += 1
    assert tried <= MAX_PROBES
    assert search.met <= capacity < search.missed <= search.met * (1 + PRECISION)


def test_a_search_that_never_meets_or_never_misses_ends() -> None:
    for met in (False, True):
        search, tried = MaxSearch(1.0), 0
        while (rate := search.rate) is not None:
            search.took(rate, met=met)
            tried += 1
        assert tried <= MAX_PROBES
        assert bool(search.met) == met
        said = verdict(search, BenchSettings(ttft_slo_ms=5))
        assert ("none missed" if met else "no rate") in said
        assert "at least 95% of the requests: TTFT ≤ 5 ms" in said


def test_a_search_ends_where_one_request_alone_misses_and_says_by_what() -> None:
    settings = BenchSettings(ttft_slo_ms=500, tpot_slo_ms=50)
    search = MaxSearch(1.0)
    search.took(1.0, met=False)
    assert search.rate == 0.5
    search.took(0.5, met=False, alone=True)
    assert search.rate is None
    slow = Sample(arrived=0.0, ttft=0.1, tokens=11, ended=1.05)
    said = verdict(search, settings, summarize(Run(samples=[slow]), settings))
    assert said.startswith("even one request at a time has TPOT 95 ms: the objective is out of reach here")
    failed = Run(samples=[Sample(arrived=0.0, error="HTTP 500")])
    assert "even one request at a time fails" in verdict(search, settings, summarize(failed, settings))
    search = MaxSearch(1.0)
    search.took(1.0, met=True, alone=True)
    assert search.rate == 2.0


def test_a_step_is_settled_once_too_many_missed() -> None:
    settings = BenchSettings(ttft_slo_ms=100, num_prompts=20, sweep="max=0.9")
    late = Sample(arrived=0.0, ttft=0.2, tokens=2, ended=1.0)
    assert not missed_already(Run(samples=[late, late]), settings)
    assert missed_already(Run(samples=[late, late, Sample(arrived=0.0, error="HTTP 500")]), settings)


# -- vLLM's words --------------------------------------------------------------------------------------------------


def test_a_script_for_vllm_means_the_same() -> None:
    line = (
        "--backend openai-chat --base-url http://a:1 --endpoint /v1/chat/completions --model m --tokenizer t "
        "--dataset-name random --random-input-len 7 --random-output-len 5 --random-range-ratio 0.5 --num-prompts 3 "
        "--request-rate inf --max-concurrency 4 --burstiness 2 --ignore-eos --seed 9 --disable-tqdm "
        "--goodput ttft:500 tpot:50 e2el:9000 --percentile-metrics ttft,e2el --metric-percentiles 50,99 "
        "--metadata a=b c=d --label run"
    )
    arguments, needless = translated(line.split())
    found = load_settings(BenchSettings, command="bench", arguments=arguments, environment={})
    expected: dict[str, Any] = {"url": "http://a:1", "endpoint": "chat", "served_model_name": "m", "input_len": 7}
    expected |= {"output_len": 5, "range_ratio": 0.5, "num_prompts": 3, "request_rate": 0, "max_concurrency": 4}
    expected |= {"burstiness": 2, "seed": 9, "ttft_slo_ms": 500, "tpot_slo_ms": 50, "e2e_slo_ms": 9000}
    assert found.model_dump(include=set(expected)) == expected
    assert metadata_of(found) == {"a": "b", "c": "d", "label": "run"}
    told = ["--tokenizer", "--dataset-name", "--disable-tqdm", "--percentile-metrics", "--metric-percentiles"]
    assert needless == told
    assert settings_of("--host", "h", "--port", "9").url == "http://h:9"
    assert settings_of("--random-input-len=12").input_len == 12


@pytest.mark.parametrize(
    ("words", "shape"),
    [
        ("--arrivals constant", 0),
        ("--arrivals poisson", 1),
        ("--arrivals=poisson --burstiness 3", 3),
        ("--burstiness inf", 0),
    ],
)
def test_release_0_1_0_s_two_kinds_of_arrivals_are_burstiness(words: str, shape: float) -> None:
    assert settings_of(*words.split()).burstiness == shape


def test_where_vllm_s_results_go() -> None:
    now = datetime(2026, 11, 22, 21, 5, 6)
    assert translated(["--save-result"], now=now)[0] == ["--output", "baton-bench-20261122-210506.json"]
    words = ["--save-result", "--save-detailed", "--result-dir", "d", "--result-filename", "r.json"]
    assert translated(words, now=now)[0] == ["--output", "d/r.json", "--output", "d/r.jsonl"]
    assert translated(["--result-dir", "d"], now=now)[0] == []


@pytest.mark.parametrize(
    "words", ["--goodput 500", "--goodput itl:5", "--backend tgi", "--host", "--arrivals even", "--dataset-name sonnet"]
)
def test_what_has_no_meaning_is_refused(words: str) -> None:
    with pytest.raises(ConfigError, match=words.split()[0]):
        translated(words.split())


# -- what results become ---------------------------------------------------------------------------------------------


def done(rate: float, ttft: float, *, settings: BenchSettings, tokens: int = 10, error: str = "") -> Done:
    samples = [Sample(arrived=0.0, ttft=ttft, gaps=[0.05] * 9, tokens=tokens, prompt_tokens=4, ended=1.0, answer="a")]
    samples += [Sample(arrived=0.5, error=error)] if error else []
    run = Run(started=0.0, ended=2.0, samples=samples)
    return Done(Step(rate), run, summarize(run, settings))


def sent(settings: BenchSettings, *steps: Done) -> Any:
    return document(settings, "http://127.0.0.1:1", "m", steps, steps[0], None)


def test_a_result_is_read_again_and_tells_no_key(tmp_path: Path) -> None:
    settings = BenchSettings(api_key="secret", ttft_slo_ms=200, metadata="gpu=H100")
    told = sent(settings, done(1, 0.1, settings=settings), done(2, 0.3, settings=settings))
    (tmp_path / "r.json").write_text(json.dumps(told))
    assert "secret" not in json.dumps(told)
    assert read(str(tmp_path / "r.json")) == told | {"label": "r.json"}
    (tmp_path / "old.json").write_text(json.dumps({"options": {"request_rate": 3.0}, "results": told["results"]}))
    assert [step["rate"] for step in read(str(tmp_path / "old.json"))["steps"]] == [3.0]
    (tmp_path / "bad.json").write_text("[]")
    for name in ("bad.json", "none.json"):
        with pytest.raises(ConfigError, match=name):
            read(str(tmp_path / name))


def test_a_row_for_each_step_and_a_line_for_each_request() -> None:
    settings = BenchSettings(ttft_slo_ms=200)
    steps = [done(1, 0.1, settings=settings, error="HTTP 500: no"), done(2, 0.3, settings=settings)]
    rows = list(csv.DictReader(io.StringIO(table(sent(settings, *steps)))))
    assert [(row["rate"], row["failed"], row["ttft_p50_ms"]) for row in rows] == [
        ("1", "1", "100.0"),
        ("2", "0", "300.0"),
    ]
    records = [json.loads(line) for line in lines(settings, steps).splitlines()]
    assert [(one["step"], one["error"], one["within"]) for one in records] == [
        (0, "", True),
        (0, "HTTP 500: no", False),
        (1, "", False),
    ]
    assert records[0]["ttft"] == 100
    assert len(records[0]["itl"]) == 9
    assert "ttft" not in records[1]


def test_a_file_s_ending_says_its_form(tmp_path: Path) -> None:
    words = [part for name in ("r.json", "r.jsonl", "r.csv", "r.html") for part in ("--output", str(tmp_path / name))]
    settings = settings_of(*words)
    one = done(1, 0.1, settings=settings)
    check_writable(settings)
    write(settings, sent(settings, one), [one], one)
    begins = {path.suffix: path.read_text()[:8] for path in tmp_path.iterdir()}
    assert begins == {".json": '{\n  "for', ".jsonl": '{"step":', ".csv": "label,mo", ".html": "<!doctyp"}
    with pytest.raises(ConfigError, match=r"--output .*: there is no folder"):
        check_writable(settings_of("--output", str(tmp_path / "none" / "r.json")))


@pytest.mark.parametrize(
    ("flag", "told"),
    [("--json", "FILE.json"), ("--html", "FILE.html"), ("--csv", "FILE.csv"), ("--per-request", "FILE.jsonl")],
)
def test_the_flags_of_single_forms_say_the_new_one(flag: str, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{flag}: one option since 0\.2: --output {told}$"):
        settings_of(flag, "r")


def test_a_step_s_line_stands_below_its_headings() -> None:
    settings = BenchSettings(ttft_slo_ms=200)
    head, row = step_head(), step_row(done(1, 0.1, settings=settings))
    assert head.split()[-1] == "within"
    assert "p99" in head
    assert row.endswith("100.0%")
    assert len(head) == len(row)
    empty = step_row(done(1, 0.1, settings=BenchSettings()))
    assert empty.endswith("-")


def test_runs_are_compared_by_load_and_what_is_better_depends_on_the_figure() -> None:
    settings, other = BenchSettings(sweep="1,2"), BenchSettings(sweep="1,4", seed=3)
    before = sent(settings, done(1, 0.1, settings=settings), done(2, 0.1, settings=settings))
    after = sent(other, done(1, 0.2, settings=other, tokens=20), done(4, 0.1, settings=other))
    said = compared(before, after)
    assert "--seed: 0 in A, 3 in B" in said
    assert [line for line in said.splitlines() if line.endswith("requests/s")] == ["1 requests/s"]
    row = next(line for line in said.splitlines() if line.startswith("TTFT p50"))
    assert row.split() == ["TTFT", "p50", "ms", "100.00", "200.00", "+100.0%", "worse"]
    assert next(line for line in said.splitlines() if line.startswith("output_tokens")).endswith("better")
    assert "goodput" not in said
    assert judged(100, 101, higher_is_better=False) == ""


def test_the_page_needs_nothing_else_and_shows_what_servers_say_as_text() -> None:
    settings = BenchSettings(ttft_slo_ms=200, sweep="1,2", metadata="label=<b>run</b>")
    evil = "HTTP 500: <script>alert(1)</script>"
    steps = [done(1, 0.1, settings=settings, error=evil), done(2, 0.3, settings=settings)]
    text = page(sent(settings, *steps), steps, steps[0], within=settings.objectives())
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "<b>run" not in text
    assert not re.findall(r"(?:src|href)=|https?://(?!127\.0\.0\.1)|url\(|@import", text)
    assert text.count("<svg") == 4 + 1 + 1 + 2 + 4 + 2  # by load, throughput, within, trade, distributions, over time
    assert "prefers-color-scheme:dark" in text
    assert "objective 200" in text
    single = page(sent(settings, steps[0]), steps[:1], steps[0], within="")
    assert single.count("<svg") == 4 + 2


def test_a_run_without_answers_has_a_page() -> None:
    settings = BenchSettings()
    run = Run(started=0.0, ended=1.0, samples=[Sample(arrived=0.0, error="HTTP 500")])
    steps = [Done(Step(1.0), run, summarize(run, settings)), Done(Step(2.0), run, summarize(run, settings))]
    assert "HTTP 500" in page(sent(settings, *steps), steps, steps[0], within="")
    assert table(sent(settings, *steps)).count("\n") == 3


def test_a_front_has_no_step_that_another_beats_in_both() -> None:
    points = [Point(1, 9), Point(2, 5), Point(2, 7), Point(3, 6), Point(4, 1), Point(1, 2)]
    assert [(point.x, point.y) for point in pareto(points)] == [(1, 9), (2, 7), (3, 6), (4, 1)]


@pytest.mark.parametrize("make", [lambda n: [0.001 * i for i in range(n)]])
def test_a_distribution_ends_at_all_of_it(make: Callable[[int], list[float]]) -> None:
    for count in (1, 2, 1000):
        found = curve(make(count))
        assert len(found) == min(60, count)
        assert found[-1].y == 100
        assert found[-1].x == pytest.approx(count - 1)
