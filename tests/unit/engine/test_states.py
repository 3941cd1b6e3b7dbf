"""States in blocks: any size of blocks gives the same answers, a checkpoint never changes, and a sequence goes on from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.pages import PagePart
from engine.cache.pages import layout_of, page_parts
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.families import model_spec
from engine.sequence import Sequence
from engine.spec.model import UnsupportedModelError
from tests.unit.engine.families import hybrids
from tests.unit.engine.families.exact import Bench, asked
from tests.unit.engine.families.exact import prompt_of as prompt_of_family
from tests.unit.engine.generate import Generator, new_sequence
from tests.unit.engine.tables import blocks_of_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hybrids.QWEN_3_5.build(tmp_path_factory.mktemp("hybrid"))


def prompt_of(length: int) -> list[int]:
    return [(31 * length + 7 * at + at * at) % 480 + 5 for at in range(length)]


def engine_of(folder: Path, size: int) -> Engine:
    def full_of_nan(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        return torch.full(shape, 255, dtype=dtype, device=device)  # all ones: NaN in every format

    config = EngineConfig(model=folder, cache=CacheConfig(num_blocks=3200 // size, block_size=size))
    return Engine(config, allocate=full_of_nan)


def test_blocks_of_any_size_give_the_same_answers(folder: Path) -> None:
    lengths, answers = (1, 63, 64, 65, 200, 300), []
    for size, chunk_size in ((16, 512), (32, 50), (64, 512), (128, 90)):
        generator = Generator(engine_of(folder, size), chunk_size=chunk_size)
        first = generator.run([new_sequence(f"r{length}", prompt_of(length)) for length in lengths])
        again = new_sequence("again", [*prompt_of(300)[:260], 9])
        answers.append([*first, *generator.run([again])])
        third = new_sequence("third", [*prompt_of(300)[:260], 8])
        answers[-1] += generator.run([third])
        assert third.num_cached == 260 // size * size
    assert all(answer == answers[0] for answer in answers)


def test_a_checkpoint_never_changes_and_others_are_not_touched(folder: Path) -> None:
    engine = engine_of(folder, 16)
    generator = Generator(engine)
    generator.run([new_sequence("first", [*prompt_of(40)[:32], 5])])
    shared = engine.kv.clone()
    branched = [new_sequence(f"r{end}", [*prompt_of(40)[:32], end], max_tokens=60) for end in (7, 8)]
    for sequence in branched:
        generator.admit(sequence)
        assert sequence.num_cached == 32
    found = {sequence.tables[1].entries[1] for sequence in branched}
    own = set[int]()
    assert len(found) == 1
    while not all(sequence.finish_reason() for sequence in branched):
        generator._advance([sequence for sequence in branched if not sequence.finish_reason()])
        own |= {block for sequence in branched for block in blocks_of_tokens(sequence)[2:]}
        own |= {block for sequence in branched for block in sequence.tables[1].entries[-1]}
    others = [block for block in range(engine.layout.num_blocks) if block not in own]
    assert not own & {*blocks_of_tokens(branched[0])[:2], *next(iter(found))}
    assert torch.equal(engine.kv[others].view(torch.uint8), shared[others].view(torch.uint8))
    assert branched[0].token_ids[33:] != branched[1].token_ids[33:]


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_next, a state in the last layer", "jamba"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    (case,) = (case for case in hybrids.CASES if case.name == request.param)
    return Bench(case, tmp_path_factory.mktemp("hybrid"))


def last_full(generator: Generator, num_tokens: int) -> int:
    """The end of the last full block of so many tokens, where a generation leaves a checkpoint."""
    return num_tokens // generator.pool.block_size * generator.pool.block_size


@pytest.mark.quick
@pytest.mark.parametrize("chunk_size", [512, 23])
def test_a_preempted_sequence_goes_on_from_its_checkpoint(bench: Bench, chunk_size: int) -> None:
    generator, _ = bench.generators(chunk_size=chunk_size)
    sequences = [asked(f"r{length}", prompt_of_family(length), max_tokens=80) for length in (70, 33)]
    for sequence in sequences:
        generator.admit(sequence)
    generator.go_on(sequences, num_tokens=3)
    for tokens, begins in ((70, 64), (75, last_full(generator, 139))):  # behind the prompt, then on the way
        lost = sequences[0]
        generator.release(lost)
        assert lost.tables == []
        generator.admit(lost)
        assert lost.num_computed == begins
        generator.go_on(sequences, num_tokens=tokens)
    generator.go_on(sequences)
    bench.check(sequences, generator)


def test_a_sequence_that_was_handed_over_leaves_checkpoints_there(bench: Bench) -> None:
    prefill, decode = bench.generators()
    sequence = asked("moved", prompt_of_family(70), max_tokens=70)
    prefill.start(sequence)
    bench.hand_over(sequence, prefill, decode)
    decode.go_on([sequence], num_tokens=60)
    decode.release(sequence)
    decode.admit(sequence)
    assert sequence.num_computed == last_full(decode, 129)
    decode.go_on([sequence])
    bench.check([sequence], prefill, decode)


@pytest.mark.quick
@pytest.mark.parametrize("drafted", [0, 3])
def test_each_turn_goes_on_from_the_end_of_the_last(bench: Bench, drafted: int) -> None:
    """Also where a pass verified tokens on both sides of a block's end."""
    turns, text = list[Sequence](), prompt_of_family(70)
    alone, _ = bench.generators()
    for turn in range(3):
        turns.append(asked(f"turn {turn}", text, max_tokens=37))
        alone.run([turns[-1]])
        text = [*turns[-1].token_ids, *prompt_of_family(20, seed=turn)]

    def draft(sequence: Sequence) -> list[int]:
        known = next(turn for turn in turns if turn.request_id == sequence.request_id).token_ids
        return known[len(sequence.token_ids) :][:drafted]

    generator, _ = bench.generators(draft=draft)
    earlier = 0
    for turn in turns:
        again = asked(turn.request_id, turn.token_ids[: turn.num_prompt_tokens], max_tokens=37)
        generator.run([again])
        assert again.num_cached >= last_full(generator, max(0, earlier - 1))
        assert again.token_ids == turn.token_ids
        bench.check([again], generator)
        earlier = len(again.token_ids)
    assert any(generator.accepted) == bool(drafted)


def test_without_room_for_a_checkpoint_a_sequence_goes_on_without(bench: Bench) -> None:
    generator, _ = bench.generators()
    sequence = asked("first", prompt_of_family(70))
    generator.admit(sequence)
    generator.pool.allocate(generator.pool.num_free - generator.pool.fixed + 1)
    generator.go_on([sequence])
    assert len({*sequence.tables[1].entries}) == 1
    generator.release(sequence)
    assert generator.pool.cached_digests() == []
    bench.check([sequence], generator)


def test_without_room_for_another_state_a_sequence_goes_on_in_its_checkpoint(bench: Bench) -> None:
    generator, _ = bench.generators()
    sequence = asked("first", prompt_of_family(70), max_tokens=20)
    generator.admit(sequence)
    generator.go_on([sequence], num_tokens=3)
    generator.release(sequence)
    cached, wanted = generator.pool.num_cached, -(-(73 + 20) // generator.pool.block_size)
    assert cached == 4 + generator.pool.fixed
    generator.pool.allocate(generator.pool.num_free - wanted - generator.pool.fixed)
    generator.admit(sequence)
    assert (sequence.num_computed, generator.pool.num_free) == (64, 0)
    table = sequence.tables[1]
    assert (len({*table.entries} - {()}), table.begin) == (1, 63)
    generator.go_on([sequence])
    bench.check([sequence], generator)


# The fields of Qwen3.6-35B-A3B's config.json that say what is computed.
TEXT = {
    "attention_bias": False, "attn_output_gate": True, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
    "hidden_size": 2048, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "shared_expert_intermediate_size": 512, "vocab_size": 248320,
    "dtype": "bfloat16", "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 10000000,
        "rope_type": "default",
    },
}  # fmt: skip
CONFIG = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "image_token_id": 248056, "model_type": "qwen3_5_moe",
    "text_config": TEXT, "tie_word_embeddings": False, "video_token_id": 248057, "vision_config": {"depth": 27},
    "vision_start_token_id": 248053, "vision_end_token_id": 248054,
}  # fmt: skip


def test_a_published_config_is_read_and_its_states_have_blocks_of_their_own() -> None:
    parts = page_parts(model_spec(CONFIG), "bfloat16")
    assert parts == [
        PagePart(layers=10, planes=2, heads=2, dim=256, dtype="bfloat16"),
        PagePart(layers=30, planes=1, heads=32, dim=128 * 128, dtype="float32", per_token=False),
        PagePart(layers=30, planes=3, heads=1, dim=8192, dtype="bfloat16", per_token=False),
    ]
    layout = layout_of(parts, CacheConfig(), 80 << 30)
    assert (layout.block_size, layout.groups[0].blocks_per_entry, layout.block_bytes) == (128, 30, 128 * 20480)
    context = -(-32_000 // layout.block_size) + layout.groups[0].blocks_per_entry
    assert context * layout.block_bytes == 734_003_200  # 2.7 GB with a state in every block of 1,024
    with pytest.raises(UnsupportedModelError, match="attn_output_gate = False"):
        model_spec({**CONFIG, "text_config": TEXT | {"attn_output_gate": False}})
    with pytest.raises(UnsupportedModelError, match="indexer_budget = 9"):
        model_spec({**CONFIG, "text_config": TEXT | {"indexer_budget": 9}})
