"""The policies that a modelled worker can follow."""

from __future__ import annotations

from functools import partial

from benchmarks.load.device import MAX_BATCH_TOKENS, MAX_SEQUENCES, PassCosts
from benchmarks.load.model import MAX_MODEL_LEN, Clock, Policy, Scheduler
from decode.pacing import GoalPacing
from decode.scheduler import DecodeScheduler
from engine.cache.block_pool import BlockPool
from worker.device.prompt_budget import PromptBudget
from worker.device.step_policy import TargetRatios


def baton(target_ms: float | None = None) -> Policy:
    """Baton's scheduler. `target_ms`: `--step-target-ms`, 0 = no bound; None = as without the option."""
    name = "baton" if target_ms is None else f"baton, step target {target_ms:g} ms"
    return Policy(name, build=_scheduler, room=_room, budget=partial(_budget, target_ms))


def _budget(target_ms: float | None, costs: PassCosts) -> PromptBudget:
    pass_ms = costs.pass_ms()
    chosen_ms = TargetRatios().targets(pass_ms).alone_ms if target_ms is None else target_ms
    budget = PromptBudget(token_budget=MAX_BATCH_TOKENS, target_ms=chosen_ms, pass_ms=pass_ms)
    budget.follows_goals = target_ms is None
    return budget


def _scheduler(pool: BlockPool, budget: PromptBudget, clock: Clock) -> Scheduler:
    pacing = GoalPacing(budget, clock=clock)
    return DecodeScheduler(pool=pool, max_sequences=MAX_SEQUENCES, max_model_len=MAX_MODEL_LEN, pacing=pacing)


def _room(scheduler: Scheduler) -> int:
    """As `DecodeRole.room`."""
    assert isinstance(scheduler, DecodeScheduler)
    return 0 if scheduler.lacks_blocks else MAX_SEQUENCES - len(scheduler)
