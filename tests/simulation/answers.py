"""The answers that clients must get."""

from __future__ import annotations

from pathlib import Path

from common.messages import PagePart
from engine.config import CacheConfig, EngineConfig
from engine.fake.engine import FakeEngine
from gateway.request.spec import GenerationSpec
from tests.simulation.forms import BLOCK, VOCAB, Form

_oracles: dict[str, FakeEngine] = {}


class Answers:
    """The answers of one world, each computed once."""

    def __init__(self, parts: list[PagePart], form: Form) -> None:
        self._oracle = _oracle(parts, form)
        self._known: dict[str, list[int]] = {}

    def of(self, spec: GenerationSpec) -> list[int]:
        name, sampling = spec.request_id, spec.sampling
        if name not in self._known:
            self._known[name] = self._oracle.expected(spec.token_ids, sampling.max_tokens, sampling)
        return self._known[name]


def _oracle(parts: list[PagePart], form: Form) -> FakeEngine:
    """An engine that no world runs."""
    kind = repr((parts, form.context))
    if kind not in _oracles:
        config = EngineConfig(
            model=Path("sim"), max_model_len=form.context, cache=CacheConfig(num_blocks=9, block_size=BLOCK)
        )
        _oracles[kind] = FakeEngine(config, vocab_size=VOCAB, parts=parts, sleep=None)
    return _oracles[kind]
