"""The cost model of a decode step, with and without prompt tokens.

At its start the engine times passes without contexts, by slots for decoding sequences and by prompt tokens. Finished
passes then show what contexts add.
"""

from __future__ import annotations

from collections.abc import Mapping

from worker.device.step_policy import StepPolicy


class StepCost:
    """Milliseconds of steps, by slots and prompt tokens."""

    def __init__(self, pass_ms: Mapping[tuple[int, int], float], policy: StepPolicy) -> None:
        """`pass_ms`: timed passes, by slots (0: prompts alone) and prompt tokens."""
        self.bare_ms = 0.0  # average step without prompts; 0 = not measured yet
        self.prompt_tokens_per_s = 0.0  # tokens / added time; 0 = not measured yet
        self._policy = policy
        self._timed = _by_slots(pass_ms)
        self._num_mixed = 0
        self._attention_ms = 0.0  # added by contexts of whole prompts, on average
        self._attention_ms_per_token = 0.0  # added by one token of context

    def add_bare(self, ms: float) -> None:
        """Add a step without prompts."""
        self.bare_ms = self._policy.smoothed(self.bare_ms, ms)

    def add_mixed(self, *, decoding: int, prompt_tokens: int, context: float, seconds: float) -> None:
        """Add a step with prompts. `context`: average positions before a prompt token."""
        policy = self._policy
        if prompt_tokens < policy.min_prompt_tokens or not self.bare_ms:
            return
        slots = policy.slots(decoding)
        self._measure_attention(slots, prompt_tokens, context, 1000 * seconds)
        # The end of a prompt costs as much as a full tile.
        filled = -(-(prompt_tokens + slots) // policy.tile_tokens) * policy.tile_tokens - slots
        added_s = max(seconds - self.bare_ms / 1000, 0.1 * seconds)
        self.prompt_tokens_per_s = policy.smoothed(self.prompt_tokens_per_s, filled / added_s)

    def predicted_ms(self, slots: int, context: int | None) -> dict[int, float]:
        """Predicted ms of a step by its prompt tokens, for the timed sizes; empty if there are none.

        `context`: positions before the first of them; None = an average prompt's.
        """
        timed = self._timed.get(slots)
        if timed is None:
            return {}
        bare_ms = self.bare_ms or timed[0]
        attention_ms = self._attention_ms if context is None else context * self._attention_ms_per_token
        return {tokens: bare_ms + ms - timed[0] + attention_ms for tokens, ms in timed.items() if tokens}

    def _measure_attention(self, slots: int, prompt_tokens: int, context: float, ms: float) -> None:
        timed = self._timed.get(slots, {})
        size = min((tokens for tokens in timed if tokens >= prompt_tokens), default=0)
        if not size:
            return
        added_ms = max(0.0, ms - self.bare_ms - (timed[size] - timed[0]))
        self._num_mixed += 1
        weight = max(self._policy.mean_smoothing, 1 / self._num_mixed)
        self._attention_ms += weight * (added_ms - self._attention_ms)
        if context >= self._policy.min_context_tokens:
            self._attention_ms_per_token = self._policy.smoothed(self._attention_ms_per_token, added_ms / context)


def _by_slots(pass_ms: Mapping[tuple[int, int], float]) -> dict[int, dict[int, float]]:
    """Map slots to {prompt tokens: ms}, where steps with and without prompts were timed.

    More tokens never take less time: where a clock says so it was a disturbance, and the smaller step's time counts.
    """
    found: dict[int, dict[int, float]] = {}
    for (slots, tokens), ms in sorted(pass_ms.items()):
        timed = found.setdefault(slots, {})
        timed[tokens] = max(ms, *timed.values()) if timed else ms
    return {slots: timed for slots, timed in found.items() if 0 in timed and len(timed) > 1}
