"""Both forms of attention over latents: which one a prompt gets, how a pass lists them, and that both are right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from engine.cache.pages import plan_layout
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.families import read_model_spec
from engine.kernels.attention import AttentionPlan, deal_out
from engine.kernels.device import Device
from engine.kernels.mla import ROOM_ON_GPUS, Forms, MLAShape, forms_on, mla_items_at_once
from engine.model.decoder import Decoder
from engine.model.layers.mla import attention as latent
from engine.passes import Pass
from engine.sequence import Sequence
from tests.unit.engine.families import experts
from tests.unit.engine.families.exact import Bench, asked, prompt_of
from tests.unit.engine.generate import new_sequence
from tests.unit.engine.tables import blocks_of_tokens, table_of

CASES = {case.name: case for case in experts.CASES}
V2_LITE = MLAShape(num_heads=16, rank=512, plain=128, rotated=64, value=128, itemsize=2)
GPU, CPU = torch.device("cuda"), torch.device("cpu")


def _least(device: torch.device, shape: MLAShape, cached: int) -> int:
    """The fewest new tokens behind cached ones for which keys and values are made."""
    forms = forms_on(device, shape)
    return next(new for new in range(1, 1000) if forms.makes(new, cached + new))


def test_keys_and_values_are_made_for_long_chunks() -> None:
    assert [_least(GPU, V2_LITE, cached) for cached in (0, 100, 1000, 30_000)] == [1, 60, 213, 317]
    wide = replace(V2_LITE, itemsize=4)
    assert [_least(CPU, wide, cached) for cached in (0, 100, 1000, 30_000)] == [1, 98, 166, 186]


def test_the_form_is_the_one_of_which_a_count_says_less() -> None:
    shape = MLAShape(num_heads=3, rank=16, plain=8, rotated=8, value=16, itemsize=2)
    for per_byte in (0, 2):
        forms, made_for = Forms(shape=shape, per_byte=per_byte, room=1), 0
        for new in range(1, 30):
            for cached in (0, 3, 10, 40):
                assert forms.makes(new, cached + new) == (
                    _made(new, cached, per_byte) < _absorbed(new, cached, per_byte)
                )
                made_for += forms.makes(new, cached + new)
        assert 30 < made_for < 100, "both forms must be the better one here and there"


def _made(new: int, cached: int, per_byte: int) -> int:
    """The cost with the sizes above, head by head and token by token."""
    cost = 0
    for _ in range(3):
        cost += sum(16 * (8 + 16) for _ in range(cached + new))
        cost += sum((8 + 8) + 16 for token in range(new) for _ in range(cached + token + 1))
    moved = sum(3 * (8 + 16) + 16 + 8 for _ in range(cached + new))
    return cost + 2 * 2 * per_byte * moved


def _absorbed(new: int, cached: int, per_byte: int) -> int:
    cost = 0
    for _ in range(3):
        cost += sum(8 * 16 + 16 * 16 for _ in range(new))
        cost += sum((16 + 8) + 16 for token in range(new) for _ in range(cached + token + 1))
    return cost + 2 * 2 * per_byte * sum(3 * ((16 + 8) + 16) for _ in range(new))


def test_what_bulk_copies_can_not_load_is_not_made() -> None:
    assert forms_on(GPU, V2_LITE).makes(100, 100)
    for field in ("plain", "rotated", "value"):
        assert not forms_on(GPU, replace(V2_LITE, **{field: 20})).makes(100, 100)


def test_heads_that_the_kernel_has_no_room_for_are_not_made() -> None:
    """No prompt of such a model could be computed on a GPU."""
    for field, most in (("plain", 256), ("rotated", 64), ("value", 256)):
        assert forms_on(GPU, replace(V2_LITE, **{field: most})).makes(100, 100)
        assert not forms_on(GPU, replace(V2_LITE, **{field: most + 8})).makes(100, 100)


def test_a_piece_is_whole_blocks_within_the_room() -> None:
    forms = forms_on(GPU, V2_LITE)
    assert forms.positions(16) == 28_720
    assert 28_720 * V2_LITE.position_bytes <= ROOM_ON_GPUS < 28_736 * V2_LITE.position_bytes
    assert replace(forms, room=1).positions(16) == 16, "at least one"


def test_one_long_context_fills_the_processors_once() -> None:
    h200 = Device(processors=132, has_tma=True, is_hopper=True)
    for num_heads, programs_of_an_item in ((16, 1), (128, 2)):
        at_once = mla_items_at_once(h200, num_heads)
        for context in (8_000, 30_000, 128_000):
            items, _ = deal_out(np.array([context]), window=0, at_once=at_once, queries=1)
            assert 110 < len(items) * programs_of_an_item <= 132
    assert mla_items_at_once(h200, 128 * 132) == 1


def test_the_pool_leaves_room_for_what_is_made(tmp_path: Path) -> None:
    case = CASES["deepseek_v2"]
    config = case.config_object()
    config.architectures = [case.architecture()]
    config.save_pretrained(tmp_path)
    spec, free = read_model_spec(tmp_path), 2 << 30
    asked_for = EngineConfig(model=tmp_path, device="cuda", max_batch_tokens=512)
    with mock.patch("torch.cuda.mem_get_info", return_value=(free, free)):
        layout = plan_layout(spec, asked_for, "bfloat16")
    used = layout.num_blocks * sum(part.block_bytes(layout.block_size) for part in layout.pages)
    assert 0.9 * (free - ROOM_ON_GPUS) < used <= 0.94 * free - ROOM_ON_GPUS


@contextmanager
def _always(makes: bool) -> Iterator[None]:
    """Within, every prompt gets this form; little is made at once."""
    with (
        mock.patch.object(Forms, "makes", return_value=makes),
        mock.patch("engine.kernels.mla.forms.ROOM_ON_CPUS", 20_000),
    ):
        yield


@pytest.mark.parametrize("makes", [True, False])
def test_either_form_answers_as_transformers(makes: bool, tmp_path: Path) -> None:
    """In chunks behind others, behind a prefix, beside sequences that decode; handed over and lost."""
    with (
        _always(makes),
        mock.patch.object(latent, "up_projected_attention", wraps=latent.up_projected_attention) as made,
    ):
        bench = Bench(CASES["deepseek_v3"], tmp_path)
        prefill, decode = bench.generators(chunk_size=23)
        moved, beside = asked("moved", prompt_of(70)), asked("beside", prompt_of(40))
        prefill.start(moved)
        bench.hand_over(moved, prefill, decode)
        decode.admit(beside)
        decode.go_on([moved, beside], num_tokens=3)
        again = asked("again", prompt_of(40)[:32] + prompt_of(9, seed=5))
        decode.admit(again)
        bench.lose(moved, decode)
        decode.admit(moved)
        decode.go_on([moved, beside, again])
        assert again.num_cached == 32
        bench.check([moved, beside, again], prefill, decode)
    assert made.called == makes


class _Plans:
    """The plans of an engine's passes."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.found = engine, list[AttentionPlan]()

    def of(self, sequences: list[Sequence], counts: list[int]) -> tuple[Pass, AttentionPlan]:
        forward = Decoder.forward

        def recorded(decoder: Decoder, batch, parts, **options):  # type: ignore[no-untyped-def]
            self.found += batch.attention.values()
            return forward(decoder, batch, parts, **options)

        with mock.patch.object(Decoder, "forward", recorded):
            chunks = [each.schedule(count) for each, count in zip(sequences, counts, strict=True)]
            return self.engine.launch(chunks), self.found[-1]


def test_a_pass_lists_prompts_by_their_form(tmp_path: Path) -> None:
    """Chunks arrive in another order. Each tile finds its queries and its context's blocks among those of its form."""
    engine = Engine(EngineConfig(model=CASES["deepseek_v2"].build(tmp_path), cache=CacheConfig(num_blocks=64)))
    lengths = {"whole": (0, 20), "behind": (64, 5), "decodes": (30, 1), "also whole": (0, 33), "also behind": (48, 3)}
    sequences, blocks = [], iter(range(60))
    for name, (cached, new) in lengths.items():
        sequence = new_sequence(name, [7] * (cached + new - (name == "decodes")) + [9] * (name == "decodes"))
        sequence.tables = [table_of([next(blocks) for _ in range(-(-(cached + new) // 16))])]
        sequence.restart(cached)
        sequences.append(sequence)
    results, plan = _Plans(engine).of(sequences, [new for _, new in lengths.values()])
    assert len(results.wait()) == 5
    assert plan.num_decode == 1
    assert plan.prefill is not None
    assert plan.made is not None
    assert plan.prefill.batch.context_len.tolist() == [69, 51]
    assert plan.made.first == 1 + 5 + 3
    made = plan.made.prompts
    assert made.batch.context_len.tolist() == [20, 33]
    assert made.blocks is not None
    ids = made.blocks[:, 0].tolist()
    for tile in made.tiles.tolist():
        first_row, rows, position, context = tile[:4]
        whole = sequences[0] if rows == 20 else sequences[3]
        assert (first_row, position) == ((0, 0) if whole is sequences[0] else (20, 0))
        assert ids[context // 16 :][: len(whole.tables[0].entries)] == blocks_of_tokens(whole)
    absorbed = sorted(tile[:3] for tile in plan.prefill.tiles.tolist())
    assert absorbed == [[0, 5, 64], [5, 3, 48]]
