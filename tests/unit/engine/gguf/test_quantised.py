# mypy: allow-untyped-calls
"""Quantised GGUF files answer as the numbers that they stand for: as floats on any device, in groups, in rows of 8 bits."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.families import read_model_spec
from engine.families.quantised import gguf as quantised
from engine.formats.dense import DENSE, Dense
from engine.formats.gguf import KEPT, GgufBlocks
from engine.formats.grouped import Grouped, WhenLoaded
from engine.formats.int8 import INT8_WHILE_LOADING, Int8Linear
from engine.kernels.experts import Experts
from engine.kernels.quantised import tiles
from engine.kernels.quantised.gguf_blocks import BLOCK_BYTES, BLOCK_ELEMENTS
from engine.kernels.quantised.groups import Groups, pack, values
from engine.kernels.quantised.slabs import Slabs, plain
from engine.model.decoder import Decoder
from engine.model.layers.sparse_mlp import SparseMlp
from engine.weights.loader import load_weights
from tests.gguf_files import write_gguf
from tests.unit.engine.families.case import Case
from tests.unit.engine.families.exact import Bench, asked, prompt_of
from tests.unit.engine.families.experts import EXPERTS
from tests.unit.engine.families.hybrids import QWEN_3_5
from tests.unit.engine.gguf.cases import GPT_OSS
from tests.unit.engine.gguf.converted import write_converted
from tests.unit.engine.insides import parts_of, products_of

WIDE = {"hidden_size": 256, "intermediate_size": 512}
MIXED = {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q5_0", "output.weight": "Q6_K"}
MIXED_EXPERTS = MIXED | {"ffn_gate_inp": "F32", "ffn_down": "Q5_K"}
LLAMA = Case(name="llama", config="LlamaConfig", fields=WIDE)
TIED = Case(name="tied", config="Qwen2Config", fields={**WIDE, "tie_word_embeddings": True})
MOE = Case(
    name="moe",
    config="Qwen3MoeConfig",
    fields={**EXPERTS, **WIDE, "moe_intermediate_size": 256, "head_dim": 64, "norm_topk_prob": True},
)
CASES = {
    **{kind: (LLAMA, {"": kind}) for kind in ("BF16", "F16", *KEPT, "IQ4_XS", "IQ3_S", "IQ2_XS")},
    "mixed": (LLAMA, MIXED),
    "tied": (TIED, {"": "Q4_K", "token_embd": "Q6_K"}),
    "experts": (MOE, MIXED_EXPERTS),
    "gpt-oss": (GPT_OSS, {"": "Q8_0", "ffn_gate_inp": "F32", "_exps.weight": "MXFP4"}),
    "gpt-oss, the rest in 16 bits": (GPT_OSS, {"": "BF16", "ffn_gate_inp": "F32", "_exps.weight": "MXFP4"}),
    "gpt-oss, Q8_0": (GPT_OSS, {"": "Q8_0"}),
}


@pytest.mark.parametrize("name", CASES)
def test_it_answers_as_the_numbers_that_it_stands_for(name: str, tmp_path: Path) -> None:
    case, kinds = CASES[name]
    bench = Bench(
        case,
        tmp_path / "model",
        stored=lambda folder: write_gguf(folder, tmp_path / "model.gguf", kind=kinds, rounded=True),
        dtype="float32",
    )
    prefill, _ = bench.generators(chunk_size=23)
    sequence = asked("alone", prompt_of(40))
    prefill.run([sequence])
    bench.check([sequence], prefill)


@pytest.mark.parametrize("kind", KEPT)
def test_groups_are_the_blocks_but_for_factors_in_16_bits(kind: str) -> None:
    rows, inputs = 48, 512
    random = np.random.default_rng(0)
    data = random.integers(0, 256, (rows, inputs // BLOCK_ELEMENTS[kind] * BLOCK_BYTES[kind]), dtype=np.uint8)
    blocks = data.reshape(-1, BLOCK_BYTES[kind])
    for at in {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(kind, (0, 2) if KEPT[kind].has_minimums else (0,)):
        factors = random.normal(0, 1e-3, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = factors[:, None].view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = random.integers(100, 130, len(blocks))
    expected = torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]))
    format = GgufBlocks(kind)
    found = format.unpacked({"weight": torch.from_numpy(data)})
    assert int(found.codes.max()) < 1 << format.bits
    like = {"bits": format.bits, "group": format.group_of(inputs), "is_e2m1": format.is_e2m1}
    groups = pack(found.codes, found.scales.to(format.scales), minimums=found.minimums, **like)
    largest = expected.unflatten(1, (-1, format.group_of(inputs))).abs().amax(-1, keepdim=True)
    error = (values(groups) - expected).unflatten(1, (-1, format.group_of(inputs))).abs()
    bound = 4 * 2.0**-11 if kind.endswith("_K") else 1e-6  # rounded scale and minimum may cancel
    assert (error <= bound * largest + 1e-9).all()
    assert torch.equal(format.plain({"weight": torch.from_numpy(data)}), expected)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K"])
def test_columns_in_another_order_take_their_factors_along(kind: str) -> None:
    data = torch.randint(0, 40, (3, 256 // BLOCK_ELEMENTS[kind] * BLOCK_BYTES[kind]), dtype=torch.uint8)
    in_turn, ours = (GgufBlocks(kind, columns) for columns in (None, (2, 4, 32)))
    expected = in_turn.plain({"weight": data}).unflatten(1, (4, 2, 32)).transpose(1, 2).flatten(1)
    assert torch.equal(ours.plain({"weight": data}), expected)
    found = ours.unpacked({"weight": data})
    groups = pack(found.codes, found.scales, bits=ours.bits, group=ours.group_of(256), minimums=found.minimums)
    assert (values(groups) - expected).abs().max() < 4e-3 * expected.abs().max()


def test_columns_that_would_tear_groups_apart_become_floats(tmp_path: Path) -> None:
    folder = QWEN_3_5.build(tmp_path / "model")
    spec = read_model_spec(write_converted(folder, tmp_path / "model.gguf", "qwen3_5", kind="Q8_0"), device="cuda:0")
    assert spec.format_of("model.layers.0.linear_attn.g_proj") == GgufBlocks("Q8_0")
    assert spec.format_of("model.layers.0.linear_attn.o_proj") == DENSE  # heads of 24


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    return write_gguf(LLAMA.build(folder / "model"), folder / "model.gguf", kind=MIXED)


def products(file: Path, **options: str) -> dict[str, object]:
    """The products of a decoder by their modules."""
    spec = read_model_spec(file, **options)
    return {name: spec.format_of(f"model.layers.0.{name}") for name in ("self_attn.q_proj", "self_attn.v_proj")}


def test_a_gpu_keeps_the_files_groups(mixed: Path) -> None:
    found = products(mixed, device="cuda:0", dtype="auto")
    assert found == {"self_attn.q_proj": GgufBlocks("Q4_K"), "self_attn.v_proj": GgufBlocks("Q6_K")}
    spec = read_model_spec(mixed, device="cuda:0")
    assert spec.format_of("lm_head") == GgufBlocks("Q6_K")
    decoder = Decoder(spec, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
    load_weights(decoder.weights, mixed)
    plain = Decoder(read_model_spec(mixed), dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
    load_weights(plain.weights, mixed)
    for one, other in zip(grouped(decoder), grouped(plain), strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() < 4e-3 * other.abs().max()


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_experts_stay_in_the_files_floats_of_4_bits(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = GPT_OSS.build(tmp_path / "model")
    file = write_gguf(folder, tmp_path / "model.gguf", kind={"": "BF16", "_exps": "MXFP4"}, rounded=True)
    floats = experts_of(folder, device="cpu")
    monkeypatch.setattr("engine.formats.groups.use_triton", lambda x: device != "cpu")
    for one, other in zip(experts_of(file, device=device), floats, strict=True):
        for matrices, expected in ((one.gate_up, other.gate_up), (one.down, other.down)):
            assert isinstance(matrices, Slabs if device == "cpu" else Groups)
            assert isinstance(expected, torch.Tensor)
            assert matrices.scales.dtype == torch.bfloat16
            for expert in range(len(expected)):
                matrix = matrices[expert]
                assert isinstance(matrix, Slabs | Groups)
                found = plain(matrix, torch.float32) if isinstance(matrix, Slabs) else values(matrix)
                assert torch.equal(found, expected[expert])


@pytest.mark.parametrize("is_fast", [False, True])
def test_a_cpu_keeps_experts_in_4_bits_beside_rows_of_8(
    is_fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "is_usable", lambda: False)
    for name in ("computes_in_bfloat16", "multiplies_bytes"):
        monkeypatch.setattr(quantised, name, lambda: is_fast)
    kinds = {"": "Q8_0", "_exps": "MXFP4"}
    file = write_gguf(GPT_OSS.build(tmp_path / "model"), tmp_path / "model.gguf", kind=kinds, tokenizer=False)
    for named, in_rows in (("auto", is_fast), ("int8", True)):
        spec = read_model_spec(file, dtype="auto", quantization=named)
        assert spec.format_of("model.layers.0.mlp.experts.0.down_proj") == GgufBlocks("MXFP4")
        assert (spec.format_of("model.layers.0.self_attn.q_proj") == INT8_WHILE_LOADING) is in_rows


def experts_of(file: Path, *, device: str) -> list[Experts]:
    """Of each layer, in the formats for a device, loaded here."""
    spec = read_model_spec(file, device=device)
    decoder = Decoder(spec, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
    load_weights(decoder.weights, file)
    parts = (part for layer in decoder._layers for part in parts_of(layer))
    return [part._mixture._experts for part in parts if isinstance(part, SparseMlp)]


def grouped(decoder: Decoder) -> list[torch.Tensor]:
    """Every matrix of the layers, as floats."""
    found = []
    for layer in decoder._layers:
        products = products_of(layer)
        for product in (products[name] for name in ("_qkv", "_output", "_gate_up", "_down")):
            parts = getattr(product, "linears", (product,))
            found.append(torch.cat([plain_of(part) for part in parts]))
    return found


def plain_of(product: object) -> torch.Tensor:
    if isinstance(product, WhenLoaded):
        assert product.loading is not None
        product = product.loading
    if isinstance(product, Grouped):
        return product.plain(torch.float32)
    assert isinstance(product, Dense)
    return product.weight


@pytest.mark.parametrize("is_fast", [False, True])
def test_a_cpu_takes_rows_of_8_bits_where_they_are_fast(
    mixed: Path, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "is_usable", lambda: False)
    for name in ("computes_in_bfloat16", "multiplies_bytes"):
        monkeypatch.setattr(quantised, name, lambda: is_fast)
    assert read_model_spec(mixed, dtype="auto").quantization.name == ("int8" if is_fast else "")
    assert read_model_spec(mixed, dtype="float32").quantization.name == ""
    if is_fast:
        engine = Engine(EngineConfig(model=mixed, cache=CacheConfig(num_blocks=8)))
        assert isinstance(products_of(engine._decoder._layers[0])["_qkv"], Int8Linear)
        floats = Engine(EngineConfig(model=mixed, dtype="float32", cache=CacheConfig(num_blocks=8)))
        asked_for = Engine(EngineConfig(model=mixed, quantization="int8", cache=CacheConfig(num_blocks=8)))
        assert engine.fingerprint == asked_for.fingerprint != floats.fingerprint


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_decoded_is_told_with_counts(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tiles, "is_usable", lambda: False)
    for name in ("computes_in_bfloat16", "multiplies_bytes"):
        monkeypatch.setattr(quantised, name, lambda: True)
    kinds = {"": "Q8_0", "attn_v": "IQ4_XS"}
    file = write_gguf(LLAMA.build(tmp_path / "model"), tmp_path / "model.gguf", kind=kinds)
    Engine(EngineConfig(model=file, dtype=dtype, cache=CacheConfig(num_blocks=8)))
    (line,) = (vars(record) for record in caplog.records if record.message == "engine.weights_changed")
    assert (line["decoded"], line["dtype"]) == ({"IQ4_XS": 2, "Q8_0": 14}, dtype)


def test_plain_files_stay_plain(tmp_path: Path) -> None:
    file = write_gguf(LLAMA.build(tmp_path / "model"), tmp_path / "model.gguf", kind="BF16")
    assert read_model_spec(file, device="cuda:0", dtype="auto").quantization.name == ""
    assert read_model_spec(file, dtype="auto").quantization.name == ""
