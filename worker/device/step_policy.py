"""The limits on prompt tokens in decode steps: the constants, and the step target that a worker follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

from common.words import Role


@dataclass(frozen=True, slots=True)
class StepTargets:
    """Average milliseconds of steps with prompts; 0 = no bound."""

    shared_ms: float = 0.0  # with another worker that prefills without decoding
    alone_ms: float = 0.0  # without one; 0 = `shared_ms`

    def chosen_ms(self, roles: Iterable[ListOf[str]]) -> float:
        """The target in a fleet with these roles. Without separate prefill workers, TTFT depends on these steps, too."""
        is_separate = any(Role.PREFILL in some and Role.DECODE not in some for some in roles)
        return self.shared_ms if is_separate else self.alone_ms or self.shared_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPolicy:
    """Constants of the prompt budget, tuned with an 8B model on an H200 (benchmarks/results/handoff.md).

    Ratios are to a bare step: at most 16 sequences, no contexts, no prompts.
    """

    target_ratio: float = 1.77
    target_ratio_alone: float = 3.5
    bare_step_ms: float = 4.0  # assumed until a bare step is measured
    tile_tokens: int = 128  # slots and prompt tokens fill whole GEMM tiles
    rounding_ratio: float = 1.15  # a whole tile may exceed the target this much
    min_slots: int = 16  # larger sizes are powers of two
    min_prompt_tokens: int = 64  # prompts advance even if the target is missed
    unmeasured_prompt_tokens: int = 256  # until a step with prompts is measured
    min_turns: float = 0.5  # minimum share of steps with prompts, whatever the target
    max_credit_ms: float = 3.0  # time saved by short steps for later long ones
    max_debt_ms: float = 5.0  # excess of long steps that later ones make up for
    max_waiting_tokens: int = 8192  # beyond it the queue could only grow, so the target is dropped
    backlog_passes: int = 4  # passes that share the waiting tokens beyond that
    arrival_pass_s: float = 0.05  # prompts alone, while a handoff waits to join
    smoothing: float = 0.2  # weight of the newest pass in an average
    mean_smoothing: float = 0.02  # small: the last passes of a prompt take longest
    min_context_tokens: int = 512  # shorter contexts say nothing about attention's cost

    def slots(self, decoding: int) -> int:
        """Slots of a step with `decoding` sequences, rounded up to whole tiles."""
        return max(self.min_slots, 1 << (decoding - 1).bit_length())

    def targets(self, pass_ms: Mapping[tuple[int, int], float]) -> StepTargets:
        """Targets for a device whose passes took `pass_ms`, by slots and prompt tokens."""
        bare = [ms for (slots, tokens), ms in pass_ms.items() if 0 < slots <= self.min_slots and not tokens]
        bare_ms = max(bare, default=self.bare_step_ms)
        return StepTargets(self.target_ratio * bare_ms, self.target_ratio_alone * bare_ms)

    def smoothed(self, average: float, newest: float) -> float:
        """The exponential average after one more measurement; 0 = no measurement yet."""
        return newest if average == 0 else average + self.smoothing * (newest - average)
