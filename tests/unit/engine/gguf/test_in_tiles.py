# mypy: allow-untyped-calls
"""A GGUF file on a CPU: its matrices stay in their bits, and answer nearly as the numbers that they stand for."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.families import read_model_spec
from engine.formats.dense import DENSE, Dense
from engine.formats.gguf import GgufBlocks
from engine.formats.product import SideBySide
from engine.formats.tiled import KINDS, GgufTiles, TiledLinear, allocated, unpacked
from engine.kernels import native
from engine.kernels.experts import Experts, mixture
from engine.kernels.experts.routing import Choice
from engine.kernels.quantised import tiles
from engine.kernels.quantised.gguf_blocks import BLOCK_BYTES, BLOCK_ELEMENTS
from engine.kernels.quantised.tiles import Tiles
from engine.model.layers.sparse_mlp import SparseMlp
from modelfiles.gguf import read_header
from tests.gguf_files import as_floats, write_gguf
from tests.unit.engine.families.case import Case
from tests.unit.engine.families.experts import EXPERTS
from tests.unit.engine.generate import Generator, new_sequence
from tests.unit.engine.insides import parts_of, products_of
from tests.unit.engine.ranks import engine_of_ranks

pytestmark = pytest.mark.skipif(not native.is_suitable() or not tiles.is_usable(), reason="no C compiler, or no AVX2")

WIDE = {"hidden_size": 256, "intermediate_size": 512}
MIXED = {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q5_0", "output.weight": "Q6_K"}
TIED = {"": "Q4_1", "token_embd": "Q8_0"}
MIXED_EXPERTS = MIXED | {"ffn_gate_inp": "F32", "ffn_down": "Q5_K"}
MOE = Case(
    name="moe",
    config="Qwen3MoeConfig",
    fields={**EXPERTS, **WIDE, "moe_intermediate_size": 256, "head_dim": 64, "norm_topk_prob": True},
)
CPU = torch.device("cpu")
NEAR = 0.4  # of a logprob: rows are rounded to 8 bits, and random weights amplify that
OF_A_PRODUCT = 0.01  # the same of a product, over the root mean square


def engine_of(file: Path, **options: object) -> Engine:
    return Engine(EngineConfig(model=file, cache=CacheConfig(num_blocks=16), **options))  # type: ignore[arg-type]


def logprobs_of(engine: Engine) -> dict[int, float]:
    """The first token's logprobs behind a prompt."""
    generator = Generator(engine)
    (sequence,) = sequences = [new_sequence("one", [*range(7, 47)], max_tokens=1, logprobs=20)]
    generator.run(sequences)
    (sampled,) = generator.results[sequence.request_id]
    assert sampled is not None
    assert sampled.logprobs is not None
    return dict(zip(sampled.logprobs.top_ids, sampled.logprobs.top_logprobs, strict=True))


def blocks_of(kind: str, rows: int, inputs: int, size: float = 1e-3) -> np.ndarray:
    """Random blocks [rows, bytes] whose numbers in float16 are about `size`."""
    random = np.random.default_rng(0)
    data = random.integers(0, 256, (rows, inputs // BLOCK_ELEMENTS[kind] * BLOCK_BYTES[kind]), dtype=np.uint8)
    blocks, has_two = data.reshape(-1, BLOCK_BYTES[kind]), KINDS[kind].has_minimums
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ2_0": (64,), "TQ1_0": (52,), "IQ1_M": ()}
    for at in places.get(kind, (0, 2) if has_two else (0,)):
        blocks[:, at : at + 2] = random.normal(0, size, len(blocks)).astype(np.float16)[:, None].view(np.uint8)
    if kind == "IQ1_M":  # the number is in the highest bits of four words
        own = random.normal(0, size, len(blocks)).astype(np.float16).view(np.uint16)
        for word in range(4):
            blocks[:, 49 + 2 * word] = blocks[:, 49 + 2 * word] & 15 | (own >> 4 * word & 15) << 4
    return data


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_are_the_blocks_but_for_factors_in_16_bits(kind: str) -> None:
    rows, inputs = 16, 512
    data, form = blocks_of(kind, rows, inputs), KINDS[kind]
    expected = torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]))
    weight = allocated(rows, inputs, kind=kind, device=CPU)
    tiles.put(weight, 0, *unpacked(GgufBlocks(kind), torch.from_numpy(data)))
    by_group = expected.unflatten(1, (-1, form.group))
    error = (weight.rows(torch.arange(rows)) - expected).unflatten(1, (-1, form.group)).abs()
    bound = (
        4 * 2.0**-11 if kind.endswith(("_K", "XS")) or kind.startswith(("IQ1", "IQ2", "IQ3")) else 1e-6
    )  # their factors are products
    assert (error <= bound * by_group.abs().amax(-1, keepdim=True) + 2e-5).all()


@pytest.mark.parametrize("size", [1e-7, 1e-3, 10.0])
@pytest.mark.parametrize("kind", tiles.PACKED)
def test_blocks_are_packed_as_if_they_were_unpacked(kind: str, size: float) -> None:
    """Factors of any size: below float16's smallest normal number, and products that are rounded."""
    data = torch.from_numpy(blocks_of(kind, 24, 768, size))
    expected, weight = (allocated(rows, 768, kind=kind, device=CPU) for rows in (24, 32))
    tiles.put(expected, 0, *unpacked(GgufBlocks(kind), data))
    weight.blocks.zero_()
    tiles.put_blocks(weight, 8, kind, data)
    assert torch.equal(weight.blocks[1:], expected.blocks)
    assert not weight.blocks[0].any()


@pytest.mark.parametrize(("kind", "size"), [("Q4_1", float("nan")), ("Q8_0", float("inf")), ("Q4_K", 3e4)])
def test_a_block_whose_factors_float16_does_not_hold_is_refused(kind: str, size: float) -> None:
    data = torch.from_numpy(blocks_of(kind, 8, 256, 1e-3))
    data[5, :2] = torch.tensor([size], dtype=torch.float16).view(torch.uint8)
    with pytest.raises(ValueError, match="too large for float16"):
        tiles.put_blocks(allocated(8, 256, kind=kind, device=CPU), 0, kind, data)


def test_columns_in_another_order_take_their_factors_along() -> None:
    data = torch.randint(0, 40, (8, 256 // BLOCK_ELEMENTS["Q4_0"] * BLOCK_BYTES["Q4_0"]), dtype=torch.uint8)
    ours = GgufBlocks("Q4_0", (2, 4, 32))
    weight = tiles.allocate(8, 256, bits=4, group=32, has_minimums=False)
    tiles.put(weight, 0, *unpacked(ours, data))
    assert torch.equal(weight.rows(torch.arange(8)), ours.plain({"weight": data}))


@pytest.mark.parametrize("kinds", [MIXED, TIED, {"": "IQ4_XS", "token_embd": "Q8_0"}], ids=["mixed", "tied", "levels"])
def test_it_answers_nearly_as_its_numbers(kinds: dict[str, str], tmp_path: Path) -> None:
    fields = WIDE | {"tie_word_embeddings": kinds is TIED}
    case = Case(name="llama", config="Qwen2Config" if kinds is TIED else "LlamaConfig", fields=fields)
    file = write_gguf(case.build(tmp_path / "model"), tmp_path / "model.gguf", kind=kinds)
    own = engine_of(file)
    layer, head = products_of(own._decoder._layers[0]), own._decoder._head.product
    assert isinstance(layer["_down"], TiledLinear)
    assert isinstance(layer["_qkv"], SideBySide if kinds is MIXED else TiledLinear)
    assert isinstance(head, TiledLinear)
    if kinds is TIED:
        assert head.weight.blocks.data_ptr() == own._decoder._embedding.table.weight.blocks.data_ptr()  # type: ignore[attr-defined]
    floats = engine_of(as_floats(file, tmp_path / "floats.gguf"), dtype="float32")
    plain, x = products_of(floats._decoder._layers[0]), torch.randn(9, 512)
    expected = plain["_down"](x)
    assert (layer["_down"](x) - expected).square().mean().sqrt() < OF_A_PRODUCT * expected.square().mean().sqrt()
    found, expected = logprobs_of(own), logprobs_of(floats)
    assert max(found, key=found.__getitem__) == max(expected, key=expected.__getitem__)
    shared = found.keys() & expected.keys()
    assert len(shared) >= 15
    assert max(abs(found[token] - expected[token]) for token in shared) < NEAR
    assert own.fingerprint != engine_of(file, dtype="float32").fingerprint


def experts_of(engine: Engine) -> Experts:
    (part,) = (part for part in parts_of(engine._decoder._layers[0]) if isinstance(part, SparseMlp))
    return part._mixture._experts


def test_experts_stay_in_their_bits(tmp_path: Path) -> None:
    """Gate and up have one kind, down has another."""
    file = write_gguf(MOE.build(tmp_path / "model"), tmp_path / "model.gguf", kind=MIXED_EXPERTS)
    own = experts_of(engine_of(file))
    assert isinstance(own.gate_up, Tiles)
    assert isinstance(own.down, Tiles)
    assert own.size == 256
    plain = experts_of(engine_of(as_floats(file, tmp_path / "floats.gguf"), dtype="float32"))
    x, ids = torch.randn(9, 256), torch.stack([torch.randperm(own.num_experts)[:2] for _ in range(9)])
    choice = Choice(ids.int(), torch.rand(9, 2))
    found, expected = mixture(x, choice, own), mixture(x, choice, plain)
    assert (found - expected).square().mean().sqrt() < 2 * OF_A_PRODUCT * expected.square().mean().sqrt()
    assert torch.equal(found[3:4], mixture(x[3:4], Choice(choice.ids[3:4], choice.weights[3:4]), own))


def test_a_rank_s_part_of_each_expert_stays_in_its_bits(tmp_path: Path) -> None:
    file = write_gguf(MOE.build(tmp_path / "model"), tmp_path / "model.gguf", kind=MIXED_EXPERTS)
    config = EngineConfig(model=file, cache=CacheConfig(num_blocks=16), enable_expert_parallel=False)
    own, whole = experts_of(engine_of_ranks(config, 2)), experts_of(engine_of(file))
    assert isinstance(own.gate_up, Tiles)
    assert isinstance(own.down, Tiles)
    assert (own.gate_up.outputs, own.down.inputs, own.num_experts) == (256, 128, whole.num_experts)
    every = torch.arange(256)
    for expert in (0, own.num_experts - 1):
        both = whole.gate_up[expert].rows(torch.arange(512)).view(2, 2, 128, -1)  # gate and up, by rank
        assert torch.equal(own.gate_up[expert].rows(every), both[:, 0].flatten(0, 1))
        assert torch.equal(own.down[expert].rows(every), whole.down[expert].rows(every)[:, :128])


def test_whoever_asks_for_float32_gets_the_files_numbers(tmp_path: Path) -> None:
    case = Case(name="llama", config="LlamaConfig", fields=WIDE)
    file = write_gguf(case.build(tmp_path / "model"), tmp_path / "model.gguf", kind=MIXED)
    named = "model.layers.0.self_attn.q_proj"
    for dtype in ("auto", "bfloat16"):
        assert read_model_spec(file, dtype=dtype).format_of(named) == GgufTiles(GgufBlocks("Q4_K"))
    assert read_model_spec(file, dtype="float32").format_of(named) == DENSE


def test_what_makes_no_whole_tiles_is_plain(tmp_path: Path) -> None:
    case = Case(name="llama", config="LlamaConfig", fields=WIDE | {"intermediate_size": 516})
    file = write_gguf(case.build(tmp_path / "model"), tmp_path / "model.gguf", kind={"": "Q8_0", "ffn_down": "F32"})
    layer = products_of(engine_of(file)._decoder._layers[0])
    assert isinstance(layer["_gate_up"], Dense)
    assert isinstance(layer["_output"], TiledLinear)


@pytest.mark.parametrize(
    ("tensor", "named"),
    [("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj"), ("token_embd.weight", "model.embed_tokens.weight")],
)
def test_a_scale_that_is_no_number_is_refused_by_its_matrix(tensor: str, named: str, tmp_path: Path) -> None:
    case = Case(name="llama", config="LlamaConfig", fields=WIDE)
    file = write_gguf(case.build(tmp_path / "model"), tmp_path / "model.gguf", kind={"": "Q8_0"})
    begin = read_header(file).tensors[tensor].begin
    content = bytearray(file.read_bytes())
    content[begin : begin + 2] = b"\x00\x7c"  # infinity
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{named}: .*float16"):
        engine_of(file)
