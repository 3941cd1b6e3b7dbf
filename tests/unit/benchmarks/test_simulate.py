"""The simulation: costs against the measured points, the trace's form, workers by hand, and the whole with the real Lua."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import redis

from benchmarks.results_format import read_results
from benchmarks.simulate import fleet as simulate_fleet
from benchmarks.simulate.__main__ import main
from benchmarks.simulate.costs import prefill_ms, step_ms
from benchmarks.simulate.fleet import Run, Worker
from benchmarks.simulate.policies import Baton, least_loaded, never, prefix_only, round_robin
from benchmarks.simulate.regret import first_token_ms, regret_ms
from benchmarks.simulate.run import Simulation, ideal
from benchmarks.simulate.trace import TraceRequest, a_day, conversations, read_trace, replicate, speed_up
from services.runtime.servers import run_redis
from worker.device.step_policy import TargetRatios


@pytest.mark.parametrize(("tokens", "milliseconds"), [(512, 13.0), (2048, 48.8), (8192, 219.0)])
def test_a_prompt_takes_as_long_as_measured(tokens: int, milliseconds: float) -> None:
    assert prefill_ms(0, tokens) == pytest.approx(milliseconds, rel=0.005)
    halves = prefill_ms(0, tokens // 2) + prefill_ms(tokens // 2, tokens // 2)
    assert halves == pytest.approx(prefill_ms(0, tokens) + prefill_ms(0, 0))  # one more pass


@pytest.mark.parametrize(("batch", "milliseconds"), [(1, 4.09), (32, 5.40), (48, 6.055), (256, 15.5)])
def test_a_decode_step_takes_as_long_as_measured(batch: int, milliseconds: float) -> None:
    assert step_ms(batch, 1100 * batch) == pytest.approx(milliseconds)
    assert step_ms(batch, 9500 * batch) > milliseconds


def test_a_trace_is_read_as_far_as_blocks_are_full(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    line = {"timestamp": 27, "input_length": 1100, "output_length": 5, "hash_ids": [0, 7, 9]}
    file.write_text(json.dumps(line) + "\n")
    (request,) = read_trace(file)
    assert (request.arrival_ms, request.prompt_tokens, request.answer_tokens, len(request.blocks)) == (27, 1100, 5, 2)
    file.write_text(json.dumps(line) + '\n{"timestamp": 28}\n')
    with pytest.raises(ValueError, match=r"trace.jsonl:2: .*input_length"):
        read_trace(file)


def test_copies_share_no_prefix_and_keep_their_order() -> None:
    trace = list(conversations(50, per_second=10))
    copies = replicate(speed_up(trace, 2), 3)
    assert len(copies) == 150
    assert len({r.blocks[0] for r in copies}) == 3 * len({r.blocks[0] for r in trace})
    assert sorted(r.arrival_ms for r in copies) == [r.arrival_ms for r in copies]


def test_a_simulated_worker_keeps_the_step_target_of_a_real_one() -> None:
    assert TargetRatios().targets({}).shared_ms == pytest.approx(simulate_fleet.STEP_TARGET_MS, rel=0.01)


def test_a_day_has_a_busy_noon_and_another_mix_behind_it() -> None:
    trace = list(conversations(4000, per_second=10))
    day = a_day(trace)
    span = trace[-1].arrival_ms
    assert [r.arrival_ms for r in day] == sorted(r.arrival_ms for r in day)
    assert day[-1].arrival_ms <= span + 1
    parts = Counter(min(9, int(10 * r.arrival_ms / span)) for r in day)
    assert parts[4] + parts[5] > 2.5 * (parts[0] + parts[9])
    assert (day[0].prompt_tokens, day[0].blocks) == (trace[0].prompt_tokens, trace[0].blocks)
    assert day[-1].prompt_tokens == trace[-1].prompt_tokens // 4
    assert len(day[-1].blocks) == day[-1].prompt_tokens // 512
    assert day[-1].answer_tokens == 4 * trace[-1].answer_tokens


def a_request(at_ms: float, tokens: int, *blocks: bytes, answer: int = 1) -> TraceRequest:
    return TraceRequest(at_ms, tokens, answer, blocks)


def fleet() -> list[Worker]:
    return [Worker("p0", "prefill"), Worker("p1", "prefill"), Worker("d0", "decode")]


def test_one_prompt_waits_for_the_other_and_finds_its_prefix() -> None:
    requests = [a_request(0, 1124, b"a", b"b"), a_request(1, 1124, b"a", b"c")]
    workers = [Worker("p0", "prefill"), Worker("d0", "decode")]
    first, second = Simulation(requests, workers, least_loaded(workers)).run().runs
    assert first.ttft_ms == pytest.approx(prefill_ms(0, 1124))
    assert second.cached_tokens == 512
    assert second.first_token_ms == pytest.approx(first.first_token_ms + prefill_ms(512, 612))


def test_tokens_come_at_the_pace_of_the_batch() -> None:
    requests = [a_request(0, 1000, b"a", answer=101)]
    workers = fleet()
    (run,) = Simulation(requests, workers, round_robin(workers)).run().runs
    assert 100 * step_ms(1, 1001) < run.end_ms - run.first_token_ms < 100 * step_ms(1, 1101) + 5
    assert [worker.pool.num_used for worker in workers] == [0, 0, 0]


def test_the_prefix_rule_piles_up_where_the_least_loaded_rule_spreads() -> None:
    requests = [a_request(0, 600, b"a")] + [a_request(1000 + n, 600, b"a") for n in range(10)]
    used = {}
    for rule in (prefix_only, least_loaded):
        workers = fleet()
        policy = rule(workers)
        Simulation(requests, workers, policy).run()
        used[policy.name] = [worker.busy_ms > 0 for worker in workers[:2]]
    assert used == {"prefix-only": [True, False], "least-loaded": [True, True]}


@pytest.mark.parametrize("batch", [0, 40])
def test_a_first_token_is_foreseen_by_the_true_state(batch: int) -> None:
    """Three prompts behind each other, the last with the second one's prefix; beside a batch only about, as it grows."""
    decoding = [a_request(0, 600, answer=100_000) for _ in range(batch)]
    worker, workers = Worker("d0", "decode"), [Worker("p0", "prefill"), Worker("p1", "prefill")]
    for number, request in enumerate(decoding):
        worker.join(Run(id=f"b{number}", request=request))
    worker.settle()
    runs = [Run(id=f"r{n}", request=a_request(0, 3000, b"a" if n else b"b", b"c")) for n in range(3)]
    foreseen = []
    for run in runs:
        foreseen.append(first_token_ms(worker, run, 0.0))
        run.prefill = worker
        assert regret_ms(run, [worker, *workers], 0.0) == pytest.approx(
            foreseen[-1] - first_token_ms(workers[0], run, 0.0)
        )
        worker.enqueue(run)
        worker.settle()
    now_ms, first_tokens = 0.0, []
    while len(first_tokens) < 3:
        wait_ms, _ = worker.settle()
        now_ms += wait_ms
        worker.advance(now_ms)
        if worker.step_over()[0] is not None:
            first_tokens.append(now_ms)
    assert runs[2].cached_tokens == 1024
    assert first_tokens == pytest.approx(foreseen, rel=0.1 if batch else 1e-6)


def test_who_is_placed_best_has_no_regret() -> None:
    workers = fleet()
    outcome = Simulation(
        [a_request(0, 3000), a_request(1, 600), a_request(2, 600)], workers, least_loaded(workers)
    ).run()
    behind_nobody = [prefill_ms(0, tokens) for tokens in (3000, 600, 600)]
    assert outcome.regrets_ms[:2] == pytest.approx([0, 0])  # the decode worker idles as well, and is as fast
    assert 0 < outcome.regrets_ms[2] < behind_nobody[2]  # the second prompt's rest: the decode worker idled
    assert outcome.mean_regret_ms == pytest.approx(outcome.regrets_ms[2] / 3)


def test_the_ideal_has_no_queue() -> None:
    outcome = ideal([a_request(0, 600, b"a"), a_request(0, 600, b"a"), a_request(0, 512, b"a")])
    assert [run.cached_tokens for run in outcome.runs] == [0, 512, 511]
    assert outcome.runs[1].ttft_ms == pytest.approx(prefill_ms(512, 88))


@pytest.mark.long
def test_the_whole_with_the_real_placement(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "--commit", "none"]) == 0
    results = {result.name: result.value for result in read_results(tmp_path / "simulate.json")}
    assert results["made_up_1P1D_x0.5_baton_goodput"] > 0
    assert results["made_up_2P2D_x8_ideal_goodput"] >= results["made_up_2P2D_x8_baton_goodput"]
    assert 0 < results["made_up_2P2D_x8_baton_hit_rate"] <= results["made_up_2P2D_x8_ideal_hit_rate"]
    assert results["made_up_2P2D_x8_baton_admission_refused"] > 0  # four times what the fleet can do
    assert results["made_up_2P2D_x8_baton_admission_goodput"] > results["made_up_2P2D_x8_baton_goodput"]
    assert results["placement_4_workers_held_server_mean"] > 0
    assert results["placement_4_workers_held_call_p99"] >= results["placement_4_workers_held_call_p50"]
    assert results["made_up_2P2D_x8_baton_regret_p99"] >= results["made_up_2P2D_x8_baton_regret_mean"] >= 0
    page = (tmp_path / "simulate.md").read_text()
    assert "| prefix-only |" in page
    assert "| baton-roles |" in page


async def test_charges_are_given_back_when_prompts_are_computed_and_answers_end(tmp_path: Path) -> None:
    async with run_redis(data_dir=tmp_path) as server:
        client = redis.Redis.from_url(server.url, protocol=2)
        policy = Baton([Worker("p0", "prefill"), Worker("d0", "decode")], client, cut_over=never)

        def place(run: Run) -> tuple[int, ...]:
            policy.place(run, 100.0)
            return tuple(int(client.get(f"baton:load:{load}") or 0) for load in ("prefill:p0", "decode:d0"))

        first, second = (Run(id=name, request=a_request(0, 6000, name.encode())) for name in ("first", "second"))
        charged = place(first)
        assert min(charged) >= 6000
        first.first_token_ms, first.end_ms = 30.0, 50.0
        policy.computed(first)
        policy.ended(first)
        assert place(second) == charged
        client.close()


def test_one_load_alone(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--load", "made_up_3P3D_x8"])
    assert main(["--out", str(tmp_path), "--commit", "none", "--load", "made_up_1P1D_x0.5"]) == 0
    names = {result.name for result in read_results(tmp_path / "simulate.json")}
    assert "made_up_1P1D_x0.5_ideal_goodput" in names
    assert not any(name.startswith(("made_up_2P2D", "placement_")) for name in names)
