"""Far more prompts than a prefill worker can compute in time, in virtual time: `python -m tests.simulation.surge RATE`."""

from __future__ import annotations

import random
import sys

from common.messages import SamplingParams
from gateway.request.spec import Aim, GenerationSpec
from tests.simulation.forms import SURGE, VOCAB
from tests.simulation.nodes import WorkerNode
from tests.simulation.world import Client, World, run_world

PROMPT_TOKENS, ANSWER_TOKENS = 100, 8
FIRST_TOKEN_S, DEADLINE_S = 3.0, 30.0
BEGINS_S = 1.0
PROMPTS_PER_S = 1 / (PROMPT_TOKENS * SURGE.token_s + sum(SURGE.pass_s))  # of one worker


class Surge(World):
    """One gateway, a prefill and a decode worker; `rate` requests a second for `seconds`, whatever comes back."""

    def __init__(self, *, rate: float, seconds: float) -> None:
        self._rate, self._seconds = rate, seconds
        super().__init__(1, form=SURGE)
        self.weather.is_calm, self.calm_at = True, 0.0

    def _draw_workers(self) -> list[WorkerNode]:
        return [WorkerNode(self, f"{role[0]}0", [role], 4000) for role in ("prefill", "decode")]

    def _draw_clients(self) -> list[Client]:
        return [self._client(number) for number in range(int(self._rate * self._seconds))]

    def _client(self, number: int) -> Client:
        dice = random.Random(number)
        spec = GenerationSpec(
            request_id=f"r{number}",
            token_ids=[dice.randrange(VOCAB) for _ in range(PROMPT_TOKENS)],
            sampling=SamplingParams(max_tokens=ANSWER_TOKENS, seed=number),
            deadline_s=DEADLINE_S,
            aim=Aim(first_token_s=FIRST_TOKEN_S),
        )
        starts_at = BEGINS_S + number / self._rate
        return Client(name=f"r{number}", gateway=self.gateways[0], spec=spec, starts_at=starts_at, leaves_at_step=None)

    def served_by(self, worker: str) -> list[Client]:
        """The clients with a whole answer while the surge lasted, of those whose prompt this worker computed."""
        return [
            client
            for client in self.clients
            if client.end == "complete"
            and client.ended_at <= BEGINS_S + self._seconds
            and client.generation.timeline.attempts[-1].claimed_by == worker
        ]


def main(arguments: list[str]) -> int:
    """Entry point: prints the prefill worker's answers a second."""
    rate, seconds = float(arguments[0]), 30.0
    world = Surge(rate=rate, seconds=seconds)
    run_world(world)
    served, ends = len(world.served_by("p0")), [client.end for client in world.clients]
    print(
        f"{served / seconds:.2f} answers a second, {100 * served / seconds / PROMPTS_PER_S:.0f} % of what it can compute"
    )
    print({end: ends.count(end) for end in sorted(set(ends))})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
