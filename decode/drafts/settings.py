"""The settings of drafters."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class MatchLengths:
    """The fewest tokens that count as a match, and the most that are compared."""

    least: int = 3
    most: int = 24

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"a match of at least {self.least} and at most {self.most} tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupSettings:
    """The settings of suffix and n-gram lookup; the defaults are those of suffix decoding (arXiv 2411.04975)."""

    lengths: MatchLengths = MatchLengths()
    factor: float = 1.0  # tokens of a draft for each of its match
    min_probability: float = 0.1  # a draft ends before its path gets rarer than this
    answer_tokens: int = 131_072  # tokens of earlier answers for each prefix-cache domain; 0: none
    domains: int = 32  # domains whose answers are kept; the least recently used gives way

    def without_answers(self) -> LookupSettings:
        """The same for a sequence's own tokens alone."""
        return replace(self, answer_tokens=0)

    @classmethod
    def ngram(cls, *, prompt_lookup_min: int = 3, prompt_lookup_max: int = 5) -> LookupSettings:
        """N-gram lookup in vLLM's sense: the sequence's own tokens, and drafts as long as they may be."""
        return cls(lengths=MatchLengths(prompt_lookup_min, prompt_lookup_max), factor=math.inf, answer_tokens=0)
