"""Who is given up for killing workers, and who only happened to be there: the real rule in a fleet of lists."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence as ListOf

import pytest

from common.messages import SamplingParams
from common.peers import Incarnation
from engine.engine import Chunk
from engine.sequence import Sequence
from gateway.lifecycle.running import (
    FEW_REQUESTS,
    MAX_UNNAMED_DEATHS,
    PROVEN_TOKENS,
    Death,
    Suspects,
)
from gateway.request.spec import GenerationSpec
from gateway.request.state import CLEAR_AFTER_TOKENS, Phase, RequestState
from worker.device.trials import Trials

HERE, THERE = Incarnation("decode-0", 1), Incarnation("decode-1", 1)
PROMPT = 5  # tokens


def request(name: str = "r", *, max_tokens: int = 50) -> RequestState:
    spec = GenerationSpec(
        request_id=name, token_ids=[1] * PROMPT, sampling=SamplingParams(max_tokens=max_tokens), deadline_s=60
    )
    return RequestState(spec=spec, deadline_at=60.0, phase=Phase.DECODING)


def test_who_was_named_before_its_second_worker_died_is_convicted_and_nobody_else() -> None:
    suspects, poison, other = Suspects(), request("poison"), request("other")
    assert not suspects.convict(poison, Death(HERE, 1))
    assert not suspects.convict(other, Death(HERE, 1))
    assert poison.is_suspect
    assert other.is_suspect
    suspects.trying(THERE, "poison", 0)
    assert suspects.convict(poison, Death(THERE, 1))
    assert not suspects.convict(other, Death(THERE, 1))
    assert other.deaths == 1  # the second one was not its fault


def test_who_was_named_and_got_its_token_is_not_blamed_for_a_death_after_that() -> None:
    suspects, state = Suspects(), request()
    suspects.convict(state, Death(HERE, 0))
    suspects.trying(THERE, "r", 0)
    assert suspects.is_tried_by("decode-1", state)
    state.generated += [7]
    suspects.heard(state, THERE)
    assert not suspects.is_tried_by("decode-1", state)
    assert not suspects.convict(state, Death(THERE, 0))


def test_a_token_of_the_pass_before_the_trial_clears_nobody() -> None:
    suspects, state = Suspects(), request()
    suspects.convict(state, Death(HERE, 0))
    suspects.trying(THERE, "r", 0)
    suspects.trying(THERE, "r", 1)
    state.generated += [7]
    suspects.heard(state, THERE)
    assert suspects.is_tried_by("decode-1", state)
    assert suspects.convict(state, Death(THERE, 0))


def test_a_name_is_of_one_incarnation() -> None:
    suspects, state = Suspects(), request()
    suspects.convict(state, Death(HERE, 0))
    suspects.trying(THERE, "another", 0)
    assert suspects.last_named("decode-1") == 1
    assert not suspects.convict(state, Death(Incarnation("decode-1", 2), 0))
    assert state.deaths == 2


def test_workers_of_a_release_that_names_nobody_cost_one_more() -> None:
    suspects, state = Suspects(), request()
    assert [suspects.convict(state, Death(Incarnation(f"decode-{n}", 1), 0)) for n in range(MAX_UNNAMED_DEATHS)] == [
        False,
        False,
        True,
    ]


def test_who_got_further_is_no_suspect_any_more() -> None:
    suspects, state = Suspects(), request()
    suspects.convict(state, Death(HERE, 0))
    for token in range(CLEAR_AFTER_TOKENS):
        assert state.is_suspect
        state.generated.append(token)
        suspects.heard(state, THERE)
    assert not state.is_suspect
    assert state.deaths == 0


def test_a_worker_that_only_fell_silent_convicts_nobody() -> None:
    suspects, state = Suspects(), request()
    assert not suspects.convict(state, Death(HERE, 0, is_certain=False))
    suspects.trying(THERE, "r", 0)
    assert not suspects.convict(state, Death(THERE, 0, is_certain=False))
    assert state.is_suspect
    suspects.trying(HERE, "r", 0)
    assert not suspects.convict(state, Death(HERE, 0))  # this is the first one that counts


def test_a_worker_that_comes_back_was_not_killed() -> None:
    suspects, state = Suspects(), request()
    suspects.convict(state, Death(HERE, 0))
    suspects.returned(HERE)
    suspects.trying(THERE, "r", 0)
    assert not suspects.convict(state, Death(THERE, 0))
    suspects.returned(HERE)  # again
    assert state.deaths == 1


def test_of_very_many_those_who_were_computed_for_long_do_not_wait_for_turns() -> None:
    suspects, old, new = Suspects(), request("old"), request("new")
    old.generated += [7] * PROVEN_TOKENS
    for state in (old, new):
        assert not suspects.convict(state, Death(HERE, FEW_REQUESTS))
    assert (old.is_suspect, new.is_suspect) == (False, True)
    suspects.convict(old, Death(THERE, FEW_REQUESTS))
    assert old.is_suspect  # twice is no chance


class Worker:
    """Computes what it has; two passes overlap. Dies of a pass with the poison."""

    def __init__(self, name: str) -> None:
        self.name, self.incarnation = name, 0
        self.restart()

    def restart(self) -> None:
        self.incarnation += 1
        self.trials = Trials()
        self.sequences: dict[str, Sequence] = {}
        self.made: dict[str, int] = {}  # tokens, here
        self.passes: deque[list[Chunk]] = deque()
        self.sent: deque[str] = deque()  # a token of each, on the way to its gateway

    @property
    def itself(self) -> Incarnation:
        return Incarnation(self.name, self.incarnation)


class Fleet:
    """Requests of two gateways on a few workers; one of them kills who computes it."""

    def __init__(self, seed: int, *, takes_turns: bool = True, tells_positions: bool = True) -> None:
        self.chance = chance = random.Random(seed)
        self.takes_turns, self.tells_positions = takes_turns, tells_positions
        self.workers = [Worker(f"decode-{n}") for n in range(chance.randint(2, 4))]
        self.suspects = {"gateway-0": Suspects(), "gateway-1": Suspects()}
        count = chance.randint(1, 40)
        self.states = {f"r{n}": request(f"r{n}", max_tokens=chance.randint(6, 12)) for n in range(count)}
        self.gateway_of = {name: chance.choice(sorted(self.suspects)) for name in self.states}
        self.poison = chance.choice(sorted(self.states))
        self.strikes_prompts = chance.random() < 0.3
        self.deaths = 0
        self.convicted: list[str] = []
        for name in self.states:
            self.place(name)

    def place(self, name: str) -> None:
        state, worker = self.states[name], self.chance.choice(self.workers)
        state.begin_attempt(0.0)
        sequence = Sequence(
            request_id=name, attempt=state.attempt, token_ids=[*state.token_ids], num_prompt_tokens=PROMPT,
            sampling=state.spec.sampling, hash_root=b"", suspect_until=state.clear_at if state.is_suspect else 0,
        )  # fmt: skip
        state.claim(state.attempt, worker.itself, 0.0)
        worker.sequences[name], worker.made[name] = sequence, 0
        worker.trials.watch(sequence, self.gateway_of[name])

    def run(self) -> None:
        for _ in range(4_000):
            busy = [worker for worker in self.workers if worker.sequences or worker.passes or worker.sent]
            if not busy:
                return
            worker = self.chance.choice(busy)
            if worker.sent and self.chance.random() < 0.5:
                self.deliver(worker)
            elif len(worker.passes) < 2 and self.chance.random() < 0.6:
                self.launch(worker)
            elif worker.passes:
                self.land(worker)
        raise AssertionError("somebody waits for ever")

    def launch(self, worker: Worker) -> None:
        in_turn = sorted(worker.sequences.values(), key=lambda one: worker.made[one.request_id])
        held_back = worker.trials.held_back(in_turn) if self.takes_turns else set()
        chunks = [
            sequence.schedule(sequence.num_unscheduled)
            for sequence in in_turn
            if sequence not in held_back and sequence.num_unscheduled
        ]
        worker.trials.planned(chunks)
        suspect = worker.trials.on_trial([chunks])
        if suspect is not None:
            for gateway in worker.trials.gateways:
                self.name(worker, suspect, gateway)
        if chunks:
            worker.passes.append(chunks)

    def name(self, worker: Worker, suspect: Sequence, gateway: str) -> None:
        """Tell a gateway, as its inbox takes it: earlier tokens may come later, by another subscription."""
        own, position = self.states[suspect.request_id], suspect.num_generated
        if self.gateway_of[suspect.request_id] != gateway or not own.is_past(suspect.attempt, position):
            self.suspects[gateway].trying(worker.itself, suspect.request_id, position if self.tells_positions else -1)

    def land(self, worker: Worker) -> None:
        chunks = worker.passes.popleft()
        if any(self.is_due(chunk) for chunk in chunks):
            self.die(worker)
            return
        worker.trials.landed(chunks)
        for chunk in chunks:
            self.sample(worker, chunk.sequence)

    def is_due(self, chunk: Chunk) -> bool:
        if chunk.sequence.request_id != self.poison:
            return False
        return chunk.start == 0 if self.strikes_prompts else chunk.num_tokens == 1 and chunk.sequence.num_generated >= 3

    def sample(self, worker: Worker, sequence: Sequence) -> None:
        name = sequence.request_id
        if name not in worker.sequences:
            return
        sequence.append(7)
        worker.made[name] += 1
        if sequence.num_generated == sequence.sampling.max_tokens:
            del worker.sequences[name]
        worker.sent.append(name)

    def deliver(self, worker: Worker) -> None:
        state = self.states[name := worker.sent.popleft()]
        state.generated.append(7)
        if state.next_position == state.spec.sampling.max_tokens:
            state.phase = Phase.ENDED
        self.suspects[self.gateway_of[name]].heard(state, worker.itself)

    def die(self, worker: Worker) -> None:
        self.deaths += 1
        while worker.sent:  # the server has them: they come before its silence is noticed
            self.deliver(worker)
        here, itself = list(worker.sequences), worker.itself
        worker.restart()
        for name in here:
            state = self.states[name]
            others = sum(self.gateway_of[other] == self.gateway_of[name] for other in here) - 1
            if self.suspects[self.gateway_of[name]].convict(state, Death(itself, others)):
                state.phase = Phase.ENDED
                self.convicted.append(name)
            else:
                self.place(name)


def outcome(seeds: ListOf[int], **rules: bool) -> list[str]:
    """What went wrong in fleets of these seeds."""
    found = []
    for seed in seeds:
        fleet = Fleet(seed, **rules)
        fleet.run()
        if fleet.deaths > 2:
            found.append(f"seed {seed}: {fleet.deaths} workers died")
        if fleet.convicted != [fleet.poison]:
            found.append(f"seed {seed}: {fleet.convicted} were convicted, not {fleet.poison}")
        if not all(state.is_over for state in fleet.states.values()):
            found.append(f"seed {seed}: not all were served")
    return found


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_one_request_kills_two_workers_at_most_however_many_are_beside_it(first: int) -> None:
    assert outcome(range(first, first + 100)) == []


def test_the_fleet_finds_a_rule_that_does_not_take_turns() -> None:
    """Negative control: all suspects at once, the last one named."""
    assert outcome(range(20), takes_turns=False)


def test_the_fleet_finds_tokens_that_come_after_the_next_trial_is_named() -> None:
    """Negative control: names without positions, as of an older release."""
    assert outcome(range(100), tells_positions=False)
