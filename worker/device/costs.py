"""Cost models of passes: of prefill, and of decode steps with and without prompt tokens.

Prefill is fitted to measured passes: a fixed part, one a token, one for attention. A token attends to all tokens before it, so
cost grows faster than length. That part is published as *double tokens*: the context length at which attention doubles the
cost of a token.

Decode steps are timed when the engine starts, in passes without contexts, by slots for decoding sequences and by prompt tokens.
Finished passes then show what contexts add.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from worker.device.step_policy import Averaging, StepSizes

FIT_MEMORY = 0.95  # decay of a pass's weight with each later one
IDLE_WEIGHT = 0.2  # lower after idling: a hot H200 is 10 % slower
MIN_WEIGHT = 3.0  # total weight needed to fit attention
# Squared coefficient of variation of pass sizes below which the parts can't be separated.
MIN_SPREAD = 0.01
ONE_SIZE_SPREAD = 1e-6  # below it, all passes have the same size
MIN_UNEXPLAINED = 0.02  # share of the pairs' variance that the tokens must leave unexplained
FULL_PASS_S = 0.1  # nobody notices that several prompts' first tokens come this late
FULL_PASS_PARTS = 20.0  # a full pass's time by its fixed part
MAX_ATTENTION_SHARE = 0.8  # upper bound of attention's share of a mean pass
UNKNOWN_ROW = 0.1  # share of the smallest step that an unmeasured row takes
PULL_SMOOTHING = 0.3
PULLS_LAST_S = 60.0
UNKNOWN_LINK = 1e9  # bytes/s
WAITS_KEPT = 15
LEAST_WAITS = 5  # fewer say nothing
LEAST_WAIT_MS = 0.05
UNKNOWN_WAIT_MS = 0.5  # the device waits for results, the next plan and its launch
WAITS_LAST = 2000  # steps
SCALE = np.array((1.0, 1e3, 1e6, 1.0))  # 1, tokens, pairs, seconds: scaled to one magnitude

NOTHING: Mapping[int, float] = MappingProxyType({})

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def pairs_of(start: int, end: int) -> float:
    """Number of (token, earlier position) pairs of tokens in [start, end)."""
    return (end - start) * (end + start) / 2


class PromptCost:
    """A non-negative least-squares fit of seconds = fixed + a * tokens + b * pairs.

    The fit covers `known` prompts, which stay, and newer passes, which fade. `b` keeps its last value while passes are too
    alike to tell it from the rest.
    """

    def __init__(self, known: Mapping[int, float] | None = None) -> None:
        """`known`: seconds of whole prompts, by their tokens."""
        # Sums of products of (1, tokens, pairs, seconds).
        self._known, self._newer = np.zeros((4, 4)), np.zeros((4, 4))
        self._fixed_s = self._token_s = self._pair_s = 0.0
        self._average_fixed_s = self._average_token_s = 0.0
        for tokens, seconds in (known or {}).items():
            self._known += _products(tokens, pairs_of(0, tokens), seconds)
        if known:
            self._fit()

    @property
    def tokens_per_s(self) -> float:
        """The rate of tokens without context; 0 = not measured yet."""
        return 1.0 / self._token_s if self._token_s > 0 else 0.0

    @property
    def fixed_ms(self) -> float:
        """The part of a pass that does not scale with its tokens."""
        return 1000 * self._fixed_s

    @property
    def double_tokens(self) -> float:
        """The context length at which a token takes twice the time; 0 = not measured yet."""
        return self._token_s / self._pair_s if self._pair_s > 0 else 0.0

    @property
    def average_tokens_per_s(self) -> float:
        """The rate of tokens with the measured passes' average context; 0 = not measured yet."""
        return 1.0 / self._average_token_s if self._average_token_s > 0 else 0.0

    @property
    def average_fixed_ms(self) -> float:
        """The part of a pass that its tokens don't explain at the average rate."""
        return 1000 * self._average_fixed_s

    def least_s(self, tokens: int) -> float:
        """Seconds that so many tokens take at least, in one pass without context; 0 = not measured yet."""
        return self._fixed_s + self._token_s * tokens

    def seconds(self, tokens: int, pairs: float) -> float:
        """Predicted seconds of a pass with prompts alone; 0 = not measured yet."""
        return self._fixed_s + self._token_s * tokens + self._pair_s * pairs

    def full_pass_tokens(self, most: int) -> int:
        """The tokens, at most `most`, from which on a larger pass delays its first prompt and computes no faster.

        Its fixed part is a twentieth by then, and it takes `FULL_PASS_S` at least.
        """
        seconds = max(FULL_PASS_S, FULL_PASS_PARTS * self._average_fixed_s)
        return min(most, int(seconds * self.average_tokens_per_s) or most)

    def add(self, tokens: int, pairs: float, seconds: float, *, after_idling: bool = False) -> None:
        """Add a pass with prompts alone. `tokens` is positive.

        `after_idling`: the device had cooled down, so the pass counts less.
        """
        weight = IDLE_WEIGHT if after_idling else 1.0
        self._newer = FIT_MEMORY**weight * self._newer + weight * _products(tokens, pairs, seconds)
        self._fit()

    def _fit(self) -> None:
        sums = self._known + self._newer
        count = float(sums[0, 0])
        mean = sums[0] / count
        spread = sums / count - np.outer(mean, mean)
        _, x, z, y = (mean * SCALE).tolist()
        _, (_, xx, xz, xy), (_, _, zz, zy), _ = (spread * np.outer(SCALE, SCALE)).tolist()
        if count > MIN_WEIGHT and zz > MIN_SPREAD * z * z:
            apart = xx * zz - xz * xz
            if xx <= ONE_SIZE_SPREAD * x * x:  # full passes of long prompts differ only in pairs
                self._pair_s = zy / zz
            elif xx > MIN_SPREAD * x * x and apart > MIN_UNEXPLAINED * xx * zz:
                self._pair_s = (zy * xx - xy * xz) / apart
        self._pair_s = max(0.0, min(self._pair_s, MAX_ATTENTION_SHARE * y / z)) if z else 0.0
        self._fixed_s, self._token_s = _line(x, y - self._pair_s * z, xx, xy - self._pair_s * xz)
        self._average_fixed_s, self._average_token_s = _line(x, y, xx, xy)


def _line(x: float, y: float, xx: float, xy: float) -> tuple[float, float]:
    """Non-negative intercept and slope, from the means, x's variance and the covariance."""
    through_zero = y / x
    slope = xy / xx if xx > MIN_SPREAD * x * x else through_zero
    slope = slope if 0.2 * through_zero < slope < through_zero else through_zero
    return max(0.0, y - slope * x), slope


def _products(tokens: float, pairs: float, seconds: float) -> Floats:
    point = np.array((1.0, tokens, pairs, seconds)) / SCALE
    return np.outer(point, point)


class RowCost:
    """Milliseconds of decode steps by rows: sequences, and the drafted tokens of those that draft.

    Timed steps had no contexts: what finished ones take longer is added to all. Without timed steps finished ones are kept by
    size: others lie on the line between their neighbours, beyond the largest on a gentle slope, which the first step of such a
    size corrects.
    """

    def __init__(self, timed: Mapping[int, float], averaging: Averaging) -> None:
        """`timed`: ms by slots; a step takes as long as one with all of its graph's slots filled."""
        self._averaging = averaging
        self._slots = sorted(timed)
        self._ms: dict[int, float] = dict(timed)
        self._added_ms = 0.0  # by contexts, to a timed step

    def add(self, rows: int, ms: float, device_ms: float | None = None) -> None:
        """Add a finished step. `device_ms`: of a captured one whose time contains its launch."""
        if not self._slots:
            self._ms[rows] = self._averaging.smoothed(self._ms.get(rows, 0.0), ms)
        elif rows <= self._slots[-1]:
            ms = ms if device_ms is None else device_ms
            self._added_ms = self._averaging.smoothed(self._added_ms, max(0.0, ms - self._ms[self._size(rows)]))

    def ms(self, rows: int) -> float:
        """Expected milliseconds of a step; 0 = nothing was measured yet."""
        if not self._ms:
            return 0.0
        if self._slots:
            # Beyond the largest no graph has room for it.
            return self._ms[self._size(rows)] + self._added_ms if rows <= self._slots[-1] else math.inf
        known = sorted(self._ms)
        if rows > known[-1]:
            return self._ms[known[-1]] + (rows - known[-1]) * UNKNOWN_ROW * self._ms[known[0]]
        return float(np.interp(rows, known, [self._ms[each] for each in known]))

    def growth(self, rows: int) -> float:
        """Ratio of a step to the smallest one without contexts; 1 = nothing was measured yet."""
        return self.ms(rows) / min(self._ms.values()) if self._ms else 1.0

    def _size(self, rows: int) -> int:
        return self._slots[bisect_left(self._slots, rows)]


class Waited(NamedTuple):
    """The times of a step that was planned after the results of the one before it, to its own results."""

    ms: float  # from those results
    device_ms: float  # from the end of its launch, drafting behind it included
    num_sequences: int


class WaitCost:
    """Milliseconds by which a step is longer that was planned after the results of the one before, instead of beside it.

    Reading these results, plan, launch and what is drafted behind the step are not hidden then. The median of the last ones
    counts; where none waited for long it is forgotten, for the machine may have been busy.
    """

    def __init__(self, draft_ms: Mapping[int, float]) -> None:
        """`draft_ms`: times of captured drafts, by sequences that draft."""
        self._draft_ms = sorted(draft_ms.items())
        self._newest: deque[float] = deque(maxlen=WAITS_KEPT)
        self._num_overlapped = 0  # steps since the last one that waited

    def ms(self, num_sequences: int) -> float:
        """Expected milliseconds, where so many draft behind it."""
        if len(self._newest) < LEAST_WAITS:
            return UNKNOWN_WAIT_MS + self.drafting_ms(num_sequences)
        return max(LEAST_WAIT_MS, statistics.median(self._newest))

    def drafting_ms(self, num_sequences: int) -> float:
        """Milliseconds of the smallest captured draft of so many sequences, or of the largest one."""
        fitting = (ms for count, ms in self._draft_ms if count >= num_sequences)
        return next(fitting, self._draft_ms[-1][1] if self._draft_ms else 0.0)

    def add(self, ms: float) -> None:
        self._newest.append(ms)
        self._num_overlapped = 0

    def overlapped(self) -> None:
        """Take note of a step that did not wait."""
        self._num_overlapped += 1
        if self._num_overlapped > WAITS_LAST:
            self._newest.clear()


class StepCost:
    """Milliseconds of steps, by slots and prompt tokens."""

    def __init__(
        self,
        pass_ms: Mapping[tuple[int, int], float],
        sizes: StepSizes,
        averaging: Averaging,
        draft_ms: Mapping[int, float] = NOTHING,
    ) -> None:
        """`pass_ms`: timed passes, by slots (0: prompts alone) and prompt tokens. `draft_ms`: see `WaitCost`."""
        self.bare_ms = 0.0  # average step without prompts; 0 = not measured yet
        self.prompt_tokens_per_s = 0.0  # tokens / added time; 0 = not measured yet
        self._sizes = sizes
        self._averaging = averaging
        self._timed = _by_slots(pass_ms)
        self.rows = RowCost({slots: ms for (slots, tokens), ms in pass_ms.items() if slots and not tokens}, averaging)
        self.waits = WaitCost(draft_ms)
        self._num_mixed = 0
        self._attention_ms = 0.0  # added by contexts of whole prompts, on average
        self._attention_ms_per_token = 0.0  # added by one token of context

    def add_bare(self, ms: float, *, rows: int, waited: Waited | None = None) -> None:
        """Add a step without prompts. `waited`: None if it overlapped the one before."""
        self.bare_ms = self._averaging.smoothed(self.bare_ms, ms)
        if waited is None:
            self.rows.add(rows, ms)
            self.waits.overlapped()
            return
        self.rows.add(rows, ms, waited.device_ms - self.waits.drafting_ms(waited.num_sequences))
        if 0 < (usual_ms := self.rows.ms(rows)) < math.inf:
            self.waits.add(waited.ms - usual_ms)

    def add_mixed(self, *, decoding: int, prompt_tokens: int, context: float, seconds: float) -> None:
        """Add a step with prompts. `context`: average positions before a prompt token."""
        sizes = self._sizes
        if prompt_tokens < sizes.min_prompt_tokens or not self.bare_ms:
            return
        slots = sizes.slots(decoding)
        self._measure_attention(slots, prompt_tokens, context, 1000 * seconds)
        # The end of a prompt costs as much as a full tile.
        filled = -(-(prompt_tokens + slots) // sizes.tile_tokens) * sizes.tile_tokens - slots
        added_s = max(seconds - self.bare_ms / 1000, 0.1 * seconds)
        self.prompt_tokens_per_s = self._averaging.smoothed(self.prompt_tokens_per_s, filled / added_s)

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
        weight = max(self._averaging.mean_smoothing, 1 / self._num_mixed)
        self._attention_ms += weight * (added_ms - self._attention_ms)
        if context >= self._averaging.min_context_tokens:
            self._attention_ms_per_token = self._averaging.smoothed(self._attention_ms_per_token, added_ms / context)


def _by_slots(pass_ms: Mapping[tuple[int, int], float]) -> dict[int, dict[int, float]]:
    """Map slots to {prompt tokens: ms}, where steps with and without prompts were timed.

    More tokens never take less time: where a clock says so it was a disturbance, and the smaller step's time counts.
    """
    found: dict[int, dict[int, float]] = {}
    for (slots, tokens), ms in sorted(pass_ms.items()):
        timed = found.setdefault(slots, {})
        timed[tokens] = max(ms, *timed.values()) if timed else ms
    return {slots: timed for slots, timed in found.items() if 0 in timed and len(timed) > 1}


class PullCost:
    """Bytes a second at which peers push what is asked of them, beside the fixed part.

    Until it is measured, and where nobody pulled for long, the slowest link between workers counts: a rate that keeps all
    from pulling would never be corrected.
    """

    def __init__(self, fixed_s: float) -> None:
        self._fixed_s = fixed_s
        self._bytes_per_s, self._at = 0.0, -math.inf

    def bytes_per_s(self, links: Iterable[float], now: float) -> float:
        """`links`: as workers measured theirs, 0 for none."""
        if now - self._at < PULLS_LAST_S:
            return self._bytes_per_s
        return min((link for link in links if link > 0), default=UNKNOWN_LINK)

    def seconds(self, num_bytes: int, links: Iterable[float], now: float) -> float:
        return self._fixed_s + num_bytes / self.bytes_per_s(links, now)

    def add(self, num_bytes: int, seconds: float, now: float) -> None:
        """Add a pull over a link that was open."""
        rate = num_bytes / max(seconds - self._fixed_s, 0.1 * seconds, 1e-6)
        weight = PULL_SMOOTHING if now - self._at < PULLS_LAST_S else 1.0
        self._bytes_per_s += weight * (rate - self._bytes_per_s)
        self._at = now
