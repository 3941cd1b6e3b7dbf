"""Models with a drafter for ranks and stages, and all that an engine drafts and says."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path

from engine.config import CacheConfig, DraftConfig, EngineConfig
from engine.engine import Engine
from engine.passes import Pass
from engine.sequence import Chunk, Sequence
from tests.models import build_tiny_model
from tests.unit.engine.drafters import drafter
from tests.unit.engine.drafts import PROMPTS, Drafts, new_sequences
from tests.unit.engine.generate import Generator, new_sequence
from tests.unit.engine.mtp_reference import FAMILIES
from worker.serving.chunks import schedule

FOUR = {"num_attention_heads": 4, "num_key_value_heads": 4}
HEADS = ("eagle3", "eagle3+norm_output+fc_norm", "eagle3+parallel", "dflash", "dflash+window", "draft_model")
MTP = ("mimo", "qwen3_next", "deepseek_v3")
SHORT = ("eagle3", "dflash", "draft_model", "mimo")  # one of each form; all others are `long`


def config_of(name: str, folder: Path, *, layers: int = 0) -> EngineConfig:
    """The model, of so many layers, and its drafter."""
    cache = CacheConfig(num_blocks=256)
    if name in MTP:
        mtp = FAMILIES[name]
        fields = {key: value for key, value in mtp.case.fields.items() if key != "layer_types"}
        deep = replace(mtp, case=replace(mtp.case, fields=fields | {"num_hidden_layers": layers})) if layers else mtp
        deep.build(folder)
        return EngineConfig(
            model=folder / "model", cache=cache, draft=DraftConfig(folder=folder / "model", num_drafts=3)
        )
    model = build_tiny_model(folder / "target", "llama", num_hidden_layers=layers or 3, **FOUR)
    (folder / "draft").mkdir()
    settings, _ = drafter(name.replace("dflash", "").strip("+") if "dflash" in name else name, model, folder / "draft")
    return EngineConfig(model=model, cache=cache, **settings)


def drafted(engine: Engine, **sampling: object) -> tuple[list[list[int]], list[object]]:
    """Answers and all drafts: of passes without verification, then of passes that verify drafts of some quality."""
    plain = Generator(engine, chunk_size=16)
    answers = plain.run(new_sequences(**sampling))
    known = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, answers, strict=True)}
    verifying = Generator(engine, chunk_size=32, draft=Drafts(known, wrong=0.3))
    assert verifying.run(new_sequences(**sampling)) == answers
    results = [*plain.results.values(), *verifying.results.values()]
    return answers, [[result and result.drafts for result in one] for one in results]


class Streams(Generator):
    """Streams in as many groups as passes are in flight, each of which verifies the drafter's own guesses."""

    def streamed(self, groups: SequenceOf[list[Sequence]]) -> None:
        for sequence in (each for group in groups for each in group):
            self.admit(sequence)
        flying = [self._launched(group) for group in groups]
        while any(flying):
            for number, group in enumerate(groups):
                for chunks, pass_ in flying[number]:
                    self.deliver(chunks, pass_)
                flying[number] = self._launched([each for each in group if not each.finish_reason()])

    def deliver(self, chunks: list[Chunk], pass_: Pass) -> None:
        super().deliver(chunks, pass_)
        for chunk in chunks:
            found = [result for result in self.results.get(chunk.sequence.request_id, ()) if result is not None]
            if found and found[-1].drafts:
                chunk.sequence.propose(found[-1].drafts)

    def _launched(self, group: list[Sequence]) -> list[tuple[list[Chunk], Pass]]:
        """All chunks of their prompts, one pass behind the other, or the next tokens."""
        passes = []
        while chunks := [self._chunk(each) for each in group if each.num_unscheduled and not each.num_pending]:
            passes.append((chunks, self.launch(chunks)))
        return passes

    def _chunk(self, sequence: Sequence) -> Chunk:
        known, drafts = sequence.proposed
        room = sequence.sampling.max_tokens - sequence.num_generated - 1
        is_new = known == len(sequence.token_ids) and sequence.num_unscheduled == 1
        return schedule(
            self.pool, sequence, min(sequence.num_unscheduled, 16), drafted=tuple(drafts[:room]) if is_new else ()
        )


def streamed(engine: Engine, *, count: int = 2, **sampling: object) -> tuple[list[list[int]], object, list[int]]:
    """Answers, results with their drafts, and acceptance, where `count` passes and chunks of prompts are in flight."""
    streams = Streams(engine)
    groups = [
        [
            new_sequence(f"{group} {each.request_id}", each.token_ids, max_tokens=14, **sampling)
            for each in new_sequences()
        ]
        for group in range(count)
    ]
    streams.streamed(groups)
    answers = [each.token_ids for group in groups for each in group]
    for each in (each for group in groups for each in group):
        streams.release(each)
    return answers, streams.results, streams.accepted
