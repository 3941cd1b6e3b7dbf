"""What computing prompts takes, fitted to the passes that were measured: a fixed part, a part for each token, and attention.

A token attends to all before it, so the time of a prompt grows faster than its length. The last part is told as *double tokens*:
behind so many tokens a token takes twice what the first one takes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

FIT_MEMORY = 0.95  # what a pass weighs in the fit when the next one came
IDLE_WEIGHT = 0.2  # of a pass before which the device idled: at its power limit an H200 takes a tenth longer
LEAST_PASSES = 3.0  # weight of the passes that attention is fitted to, at least
LEAST_SPREAD = 0.01  # variance by squared mean: with less, passes of about one size don't tell the parts apart
NO_SPREAD = 1e-6  # the same of passes of one size
LEAST_APART = 0.02  # share of the pairs' variance that the tokens don't explain, at least
MOST_ATTENTION = 0.8  # of a mean pass
SCALE = np.array((1.0, 1e3, 1e6, 1.0))  # of 1, tokens, pairs, seconds: their squares are of one size

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def pairs_of(start: int, end: int) -> float:
    """Pairs of a token of [start, end) and one before it."""
    return (end - start) * (end + start) / 2


class PromptCost:
    """Least squares of seconds = fixed + a tokens + b pairs, each 0 or more, over `known` prompts
    and newer passes, which are forgotten.

    `b` is a property of model and device: it stays as it was fitted last while passes are too alike to tell it from the rest.
    """

    def __init__(self, known: Mapping[int, float] | None = None) -> None:
        """`known`: what whole prompts take, seconds by their tokens."""
        self._known, self._newer = np.zeros((4, 4)), np.zeros((4, 4))  # sums of products of (1, tokens, pairs, seconds)
        self._fixed_s = self._token_s = self._pair_s = 0.0
        self._average_fixed_s = self._average_token_s = 0.0
        for tokens, seconds in (known or {}).items():
            self._known += _products(tokens, pairs_of(0, tokens), seconds)
        if known:
            self._fit()

    @property
    def tokens_per_s(self) -> float:
        """Of tokens without anything before them; 0 = not measured yet."""
        return 1.0 / self._token_s if self._token_s > 0 else 0.0

    @property
    def fixed_ms(self) -> float:
        """Of a pass."""
        return 1000 * self._fixed_s

    @property
    def double_tokens(self) -> float:
        """Behind how many tokens one takes twice the time; 0 = not measured yet."""
        return self._token_s / self._pair_s if self._pair_s > 0 else 0.0

    @property
    def average_tokens_per_s(self) -> float:
        """Of tokens with as much before them as the measured ones had; 0 = not measured yet."""
        return 1.0 / self._average_token_s if self._average_token_s > 0 else 0.0

    @property
    def average_fixed_ms(self) -> float:
        """Of a pass, beside its tokens at that rate."""
        return 1000 * self._average_fixed_s

    def add(self, tokens: int, pairs: float, seconds: float, *, after_idling: bool = False) -> None:
        """Take a pass of prompts alone into account. `tokens` is positive.

        `after_idling`: the device had nothing to do before, and cooled down. What is predicted is mostly what waits in a queue.
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
        if count > LEAST_PASSES and zz > LEAST_SPREAD * z * z:
            apart = xx * zz - xz * xz
            if xx <= NO_SPREAD * x * x:  # full passes of long prompts: only the pairs differ
                self._pair_s = zy / zz
            elif xx > LEAST_SPREAD * x * x and apart > LEAST_APART * xx * zz:
                self._pair_s = (zy * xx - xy * xz) / apart
        self._pair_s = max(0.0, min(self._pair_s, MOST_ATTENTION * y / z)) if z else 0.0
        self._fixed_s, self._token_s = _line(x, y - self._pair_s * z, xx, xy - self._pair_s * xz)
        self._average_fixed_s, self._average_token_s = _line(x, y, xx, xy)


def _line(x: float, y: float, xx: float, xy: float) -> tuple[float, float]:
    """Intercept and slope, both 0 or more, by the means of x and y, the variance of x and their covariance."""
    through_zero = y / x
    slope = xy / xx if xx > LEAST_SPREAD * x * x else through_zero
    slope = slope if 0.2 * through_zero < slope < through_zero else through_zero
    return max(0.0, y - slope * x), slope


def _products(tokens: float, pairs: float, seconds: float) -> Floats:
    point = np.array((1.0, tokens, pairs, seconds)) / SCALE
    return np.outer(point, point)
