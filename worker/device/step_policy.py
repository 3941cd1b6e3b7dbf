"""The limits on prompt tokens in decode steps: the constants, and the step target that a worker follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

from common.words import Role

MIN_SLOTS = 16  # the smallest step


@dataclass(frozen=True, slots=True)
class StepTargets:
    """Average milliseconds of steps with prompts; 0 = no bound."""

    shared_ms: float = 0.0  # with another worker that prefills without decoding
    alone_ms: float = 0.0  # without one; 0 = `shared_ms`
    follow_goals: bool = False  # goals may exceed them

    def chosen_ms(self, roles: Iterable[ListOf[str]]) -> float:
        """The target in a fleet with these roles. Without separate prefill workers, TTFT depends on these steps, too."""
        is_separate = any(Role.PREFILL in some and Role.DECODE not in some for some in roles)
        return self.shared_ms if is_separate else self.alone_ms or self.shared_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRatios:
    """The step targets' ratios to a bare step: at most 16 sequences, no contexts, no prompts."""

    shared: float = 1.77
    alone: float = 3.5
    bare_step_ms: float = 4.0  # assumed until a bare step is measured

    def targets(self, pass_ms: Mapping[tuple[int, int], float]) -> StepTargets:
        """Targets for a device whose passes took `pass_ms`, by slots and prompt tokens."""
        bare = [ms for (slots, tokens), ms in pass_ms.items() if 0 < slots <= MIN_SLOTS and not tokens]
        bare_ms = max(bare, default=self.bare_step_ms)
        return StepTargets(self.shared * bare_ms, self.alone * bare_ms, follow_goals=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """The tokens of a step with prompts: slots and prompt tokens fill whole GEMM tiles."""

    tile_tokens: int = 128
    rounding_ratio: float = 1.15  # a whole tile may exceed the target this much
    min_prompt_tokens: int = 64  # prompts advance even if the target is missed
    unmeasured_prompt_tokens: int = 256  # until a step with prompts is measured

    def slots(self, decoding: int) -> int:
        """Slots of a step with `decoding` sequences; sizes above the least are powers of two."""
        return max(MIN_SLOTS, 1 << (decoding - 1).bit_length())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTurns:
    """The share of steps with prompts: time that short steps save, and that long ones overdraw."""

    min_share: float = 0.5  # whatever the target
    max_credit_ms: float = 3.0  # saved for later long steps
    max_debt_ms: float = 5.0  # made up for by later short steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """The waiting prompt tokens that outweigh the target, and prompts alone while a handoff waits to join."""

    max_waiting_tokens: int = 8192  # beyond it the queue could only grow, so the target is dropped
    passes: int = 4  # share the waiting tokens beyond that
    arrival_pass_s: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """The averages over measured passes."""

    smoothing: float = 0.2  # weight of the newest pass
    mean_smoothing: float = 0.02  # small: the last passes of a prompt take longest
    min_context_tokens: int = 512  # shorter contexts say nothing about attention's cost

    def smoothed(self, average: float, newest: float) -> float:
        """The exponential average after one more measurement; 0 = no measurement yet."""
        return newest if average == 0 else average + self.smoothing * (newest - average)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPolicy:
    """Constants of the prompt budget, tuned with an 8B model on an H200 (benchmarks/results/handoff.md)."""

    sizes: StepSizes = StepSizes()
    turns: StepTurns = StepTurns()
    backlog: Backlog = Backlog()
    averaging: Averaging = Averaging()
