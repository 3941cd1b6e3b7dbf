# mypy: allow-untyped-calls
"""What windows see is kept in blocks of its own, and what they no longer see never matters: it is overwritten with NaN."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from common.pages import PagePart, entry_places
from engine.cache.pages import layout_of, page_parts
from engine.cache.windows import with_windows
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine, InvalidChunkError
from engine.families import model_spec
from engine.groups import Group, group_of
from engine.step.block_tables import BlockTables
from engine.step.limits import GroupTables
from tests.unit.engine.by_hand import ByHand
from tests.unit.engine.families.case import Case
from tests.unit.engine.families.catalogue import CASES
from tests.unit.engine.families.exact import TOLERANCE, asked, prompt_of
from tests.unit.engine.families.published import PUBLISHED
from tests.unit.engine.tables import entries_table, groups_with, table_of

LENGTHS = (1, 16, 70, 100)
MAX_TOKENS = 40  # two windows further
BLOCK = 16


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def started(folder: Path, **options: Any) -> Engine:
    return Engine(EngineConfig.of(model=folder, num_blocks=96, **options))


@pytest.fixture(scope="module", params=["gemma3", "gpt_oss", "llama4-chunks"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Path]:
    case = case_of(request.param)
    return case, case.build(tmp_path_factory.mktemp("windows"))


@pytest.mark.quick
@pytest.mark.parametrize("chunk_size", [512, 23])
def test_tokens_are_transformers_though_entries_went(checkpoint: tuple[Case, Path], chunk_size: int) -> None:
    case, folder = checkpoint
    judge = getattr(transformers, case.architecture()).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    hand = ByHand(started(folder), chunk_size=chunk_size)
    sequences = [asked(f"of {length}", prompt_of(length), max_tokens=MAX_TOKENS) for length in LENGTHS]
    hand.run(sequences[:1])
    hand.run(sequences[1:])
    for sequence in sequences:
        with torch.inference_mode():
            expected = judge.eval()(torch.tensor([sequence.token_ids])).logits[0].float().log_softmax(dim=-1)
        for at, sampled in enumerate(hand.results[sequence.request_id], start=sequence.num_prompt_tokens - 1):
            assert sampled is not None
            assert sampled.logprobs is not None
            assert sampled.token_id == int(expected[at].argmax())
            ours = torch.tensor(sampled.logprobs.top_logprobs)
            assert float((ours - expected[at][sampled.logprobs.top_ids]).abs().max()) < TOLERANCE


def test_a_sequence_holds_what_its_next_token_sees(checkpoint: tuple[Case, Path]) -> None:
    engine = started(checkpoint[1])
    [group] = engine.layout.groups
    assert group.blocks_per_entry == group.parts[0].layers // engine.layout.num_layers
    hand = ByHand(engine, chunk_size=23)
    sequence = asked("long", prompt_of(150), max_tokens=200)
    hand.run([sequence])
    num_blocks = -(-sequence.num_computed // BLOCK)
    held = num_blocks - (sequence.num_computed - group.window + 1) // BLOCK
    assert held <= group.window // BLOCK + 2
    assert hand.num_held(sequence) == num_blocks + group.blocks_per_entry * held


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["auto", "fp8", "int8", "int4"])
@pytest.mark.parametrize("chunk_size", [512, 23])
def test_answers_are_those_of_blocks_with_all_layers(tmp_path: Path, kind: str, chunk_size: int) -> None:
    folder = case_of("gemma3").build(tmp_path)
    answers, fingerprints = [], set[str]()
    for disabled in (False, True):
        engine = started(folder, kv_cache_dtype=kind, disable_hybrid_kv_cache_manager=disabled)
        fingerprints.add(engine.fingerprint)
        sequences = [asked(f"of {length}", prompt_of(length), max_tokens=MAX_TOKENS) for length in LENGTHS]
        hand = ByHand(engine, chunk_size=chunk_size)
        hand.run(sequences)
        answers.append((bool(engine.layout.groups), hand.results))
    (has_windows, ours), (has_not, theirs) = answers
    assert (has_windows, has_not) == (True, False)
    assert len(fingerprints) == 2, "such workers would take each other's blocks for theirs"
    assert ours == theirs


def test_an_entry_that_went_too_early_is_missed(tmp_path: Path) -> None:
    engine = started(case_of("gpt_oss").build(tmp_path))

    def one_more(hand: ByHand, group: Group, num_computed: int) -> int:
        return group.first_seen(num_computed) + 1 if group.most else 0

    early = mock.patch.object(ByHand, "first_kept", one_more)
    with early, pytest.raises(InvalidChunkError, match="entry 2 of KV group 1 is gone, which the token at 70 reads"):
        ByHand(engine).run([asked("early", prompt_of(70))])
    # Nor can what is there be a mistake of the engine's.
    blind = mock.patch("engine.step.limits.wrong_tables", return_value="")
    with early, blind, pytest.raises(AssertionError, match="NaN among the logits"):
        ByHand(engine).run([asked("early", prompt_of(70))])


@pytest.mark.parametrize(
    ("name", "window_blocks", "today", "ours"),
    [
        ("gemma-3-12b", 5, 12.58, 2.43),  # GB of a sequence of 32,000 tokens
        ("gpt-oss-20b", 1, 1.57, 0.79),
    ],
)
def test_a_long_sequence_of_published_models(name: str, window_blocks: int, today: float, ours: float) -> None:
    """As docs/kv.md says."""
    cache, num_tokens = CacheConfig(), 32_000
    model = model_spec(PUBLISHED[name])
    before, after = (
        layout_of(page_parts(each, "bfloat16"), cache, 64 << 30)
        for each in (model, with_windows(model, cache, "bfloat16", model.max_position_embeddings))
    )
    [group] = after.groups
    assert (before.groups, group.blocks_per_entry) == ((), window_blocks)
    num_blocks, window = num_tokens // BLOCK, group_of(group, BLOCK)
    held = num_blocks + window_blocks * (num_blocks - window.first_seen(num_tokens))
    assert round(num_blocks * before.block_bytes / 1e9, 2) == today
    assert round(held * after.block_bytes / 1e9, 2) == ours


@pytest.mark.parametrize(
    ("name", "longest"),
    [
        ("gpt_oss", 47),  # less than two windows
        ("mistral", 512),  # no layer sees everything
        ("gemma4-small", 512),  # their blocks would be nearly empty
    ],
)
def test_where_windows_would_not_pay_all_stays_as_it_was(name: str, longest: int) -> None:
    config = case_of(name).config_object().to_dict()
    model = model_spec(config | {"architectures": [case_of(name).architecture()]})
    assert with_windows(model, CacheConfig(), "float32", longest) is model


def test_a_pass_names_no_entry_that_its_tokens_do_not_read() -> None:
    tables = BlockTables(
        max_blocks=8, num_blocks=40, groups=GroupTables(groups_with(BLOCK, window=20, window_blocks=2))
    )
    sequence = asked("a", prompt_of(100))
    tokens, window = table_of([0, 1, 2]), entries_table([(10, 11), (12, 13), (14, 15)])
    sequence.tables = [tokens, window]
    (row,) = tables.rows_of([sequence.schedule(40)])
    assert tables.table[:, row, :3].tolist() == [[0, 1, 2], [10, 12, 14], [11, 13, 15]]
    tokens.entries.append((3,))
    window.entries.append((16, 17))
    tables.rows_of([sequence.schedule(20)])
    assert tables.table[1, row, :4].tolist() == [-1, 12, 14, 16]
    sequence.restart(0)  # with all that it has
    tables.rows_of([sequence.schedule(64)])
    assert tables.table[:, row, :4].tolist() == [[0, 1, 2, 3], [10, 12, 14, 16], [11, 13, 15, 17]]
    window.entries = [*window.entries[:-1], (16,)]
    with pytest.raises(InvalidChunkError, match="an entry of 1 blocks, not 2"):
        tables.rows_of([sequence.schedule(1)])
    window.entries[-1] = (16, 40)
    with pytest.raises(InvalidChunkError, match="block 40 is not in"):
        tables.rows_of([sequence.schedule(1)])


def test_a_layer_with_its_parts_is_in_one_block() -> None:
    parts = [
        PagePart(layers=5, planes=2, heads=2, dim=24, dtype="uint8", window=20),
        PagePart(layers=5, planes=2, heads=2, dim=1, dtype="float32", window=20),
    ]
    codes, scales = 2 * 2 * 24 * BLOCK, 2 * 2 * 4 * BLOCK
    each = codes + scales
    assert entry_places(parts, 2 * each + 16, BLOCK) == [
        [(0, 0), (0, each), (1, 0), (1, each), (2, 0)],
        [(0, codes), (0, each + codes), (1, codes), (1, each + codes), (2, codes)],
    ]
    assert entry_places(parts, each - 1, BLOCK) == []
