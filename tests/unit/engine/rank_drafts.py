"""Models with a drafter for ranks to share, and all that an engine drafts and says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.config import CacheConfig, DraftConfig, EngineConfig
from engine.engine import Engine
from tests.models import build_tiny_model
from tests.unit.engine.drafters import drafter
from tests.unit.engine.drafts import PROMPTS, Drafts, new_sequences
from tests.unit.engine.generate import Generator
from tests.unit.engine.mtp_reference import FAMILIES

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
