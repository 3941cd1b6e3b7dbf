# mypy: allow-untyped-calls
"""Matrices that a checkpoint has as 16-bit floats, on a CPU that computes in float32: they stay, answers are float32's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import resolving
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.families import quantised, read_model_spec
from engine.fit import needs
from engine.formats.dense import Dense, HalvesLinear, HalvesTable, PlainTable
from engine.formats.grouped import TiledLinear
from engine.formats.product import SideBySide
from engine.kernels import native
from engine.kernels.embedding import InputTokens
from engine.kernels.experts import Experts
from engine.kernels.native import halves
from engine.kernels.native.halves import Halves
from engine.model.decoder import Decoder
from tests.gguf_files import write_gguf
from tests.unit.engine.families.case import Case
from tests.unit.engine.families.experts import CASES
from tests.unit.engine.formats.checkpoints import in_16_bits, written
from tests.unit.engine.formats.forms import FORMS, source_of
from tests.unit.engine.formats.loading import Tiny
from tests.unit.engine.generate import Generator, new_sequence
from tests.unit.engine.insides import products_of
from tests.unit.engine.rank_forms import LLAMA, TIED

pytestmark = pytest.mark.skipif(not native.is_suitable() or not halves.is_usable(), reason="no C compiler, or no AVX2")

TOKENS = InputTokens.known_alone(torch.tensor([0, 3, 95, 3]), torch.zeros(1, dtype=torch.int64))


def decoder_of(model: Path, *, dtype: str = "auto") -> Decoder:
    config = EngineConfig(model=model, dtype=dtype, cache=CacheConfig(num_blocks=16))
    return Engine(config)._decoder


def in_awq(tiny: Tiny, folder: Path, dtype: torch.dtype) -> tuple[Path, Path]:
    """A checkpoint of AWQ whose other matrices have this dtype, and the same numbers in float32."""
    form = FORMS["awq"]
    model = written(source_of(form, tiny, folder), folder / "own", form.store, form.config, keeps=form.keeps)
    in_16_bits(model, dtype)
    wide = folder / "wide"
    wide.mkdir()
    (wide / "config.json").write_bytes((model / "config.json").read_bytes())
    tensors = load_file(model / "model.safetensors")
    found = {name: each.float() if each.dtype == dtype and each.dim() == 2 else each for name, each in tensors.items()}
    save_file(found, wide / "model.safetensors", metadata={"format": "pt"})
    return model, wide


def tokens_of(model: Path, *, chunk_size: int = 512) -> list[list[int]]:
    prompts = [[*range(7, 7 + length)] for length in (1, 9, 40)]
    engine = Engine(EngineConfig(model=model, cache=CacheConfig(num_blocks=32)))
    sequences = [new_sequence(str(number), prompt) for number, prompt in enumerate(prompts)]
    return Generator(engine, chunk_size=chunk_size).run(sequences)


@pytest.mark.parametrize("dtype", halves.DTYPES, ids=str)
def test_a_plain_head_and_table_beside_tiles_keep_their_16_bits(
    dtype: torch.dtype, tiny_model: Tiny, tmp_path: Path
) -> None:
    own, wide = (decoder_of(model) for model in in_awq(tiny_model, tmp_path, dtype))
    head, theirs = own._head.product, wide._head.product
    assert isinstance(head, HalvesLinear)
    assert isinstance(theirs, Dense)
    assert head.weight.panels.dtype == dtype
    table, plain = own._embedding.table, wide._embedding.table
    assert isinstance(table, HalvesTable)
    assert isinstance(plain, PlainTable)
    assert torch.equal(table.rows(TOKENS), plain.rows(TOKENS))
    assert torch.equal(head.weight.rows(torch.arange(head.weight.outputs)), theirs.weight)
    for count in (1, 40):
        x = torch.randn(count, head.weight.inputs)
        torch.testing.assert_close(head(x), theirs(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", halves.DTYPES, ids=str)
def test_answers_are_those_of_the_same_numbers_however_they_come(
    dtype: torch.dtype, tiny_model: Tiny, tmp_path: Path
) -> None:
    """Prompts at once and token by token, and what follows them."""
    own, wide = in_awq(tiny_model, tmp_path, dtype)
    said = tokens_of(own)
    assert said == tokens_of(own, chunk_size=3) == tokens_of(wide)
    assert len({token for tokens in said for token in tokens}) > 3


def test_a_model_in_16_bits_needs_less_memory(tiny_model: Tiny, tmp_path: Path) -> None:
    own, wide = in_awq(tiny_model, tmp_path, torch.bfloat16)
    spec = read_model_spec(own, dtype="auto")
    saved = 2 * 2 * spec.vocab_size * spec.hidden_size  # two bytes of head and table
    first, second = (needs(EngineConfig(model=model), total=1 << 30).weights for model in (own, wide))
    assert second - first == saved


def test_another_compute_dtype_has_plain_weights(tiny_model: Tiny, tmp_path: Path) -> None:
    own, _ = in_awq(tiny_model, tmp_path, torch.bfloat16)
    assert isinstance(decoder_of(own, dtype="bfloat16")._head.product, Dense)


def plain_in(dtype: torch.dtype, tiny: Tiny, folder: Path) -> Path:
    """A checkpoint without quantisation whose matrices have 16 bits, and says so."""
    shutil.copytree(tiny("qwen2"), folder / "plain")
    config = folder / "plain" / "config.json"
    name = str(dtype).removeprefix("torch.")
    fields = {key: each for key, each in json.loads(config.read_bytes()).items() if key not in ("dtype", "torch_dtype")}
    config.write_text(json.dumps(fields | {"torch_dtype": name}))
    return in_16_bits(folder / "plain", dtype)


@pytest.mark.parametrize("dtype", halves.DTYPES, ids=str)
@pytest.mark.parametrize("is_fast", [False, True])
def test_plain_checkpoints_stay_in_16_bits_where_nothing_multiplies_these(
    is_fast: bool, dtype: torch.dtype, tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--dtype auto` keeps float16 anywhere, bfloat16 unless oneDNN multiplies it; answers are those of float32."""
    monkeypatch.setattr(halves, "multiplies_pairs", lambda: False)
    for module in (quantised, resolving):
        monkeypatch.setattr(module, "computes_in_bfloat16", lambda: is_fast)
    model = plain_in(dtype, tiny_model, tmp_path)
    decoder = decoder_of(model)
    stays = dtype == torch.float16 or not is_fast
    assert decoder.weights.dtype == (torch.float32 if stays else torch.bfloat16)
    products = [each for layer in decoder._layers for each in products_of(layer).values()]
    linears = [each for each in (*products, decoder._head.product) if isinstance(each, Dense | HalvesLinear)]
    assert len(linears) > 4 * len(decoder._layers)
    assert {isinstance(each, HalvesLinear) for each in linears} == {stays}
    assert isinstance(decoder._embedding.table, HalvesTable) == stays
    if not stays:
        return
    wide = tmp_path / "wide"
    shutil.copytree(model, wide)
    tensors = load_file(wide / "model.safetensors")
    save_file({name: each.float() for name, each in tensors.items()}, wide / "model.safetensors", {"format": "pt"})
    said = tokens_of(model)
    assert said == tokens_of(model, chunk_size=3) == tokens_of(wide)


needs_pairs = pytest.mark.skipif(not halves.multiplies_pairs(), reason="no AVX512-BF16, or AMX beside it")


MIXTURES = {
    case.name: case
    for case in CASES
    if case.name in ("qwen3_moe", "granitemoe", "gpt_oss", "llama4", "mixtral", "lfm2_moe")
}


def mixture_in(dtype: torch.dtype, case: Case, folder: Path) -> Path:
    """A checkpoint with experts whose matrices have 16 bits, and says so."""
    model = case.build(folder / "experts")
    config = model / "config.json"
    fields = {key: each for key, each in json.loads(config.read_bytes()).items() if key not in ("dtype", "torch_dtype")}
    config.write_text(json.dumps(fields | {"torch_dtype": str(dtype).removeprefix("torch.")}))
    file = model / "model.safetensors"
    tensors = {name: each.to(dtype) if each.dim() > 1 else each for name, each in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    return model


def experts_of(decoder: Decoder) -> list[Experts]:
    mixtures = (products_of(layer).get("_mixture") for layer in decoder._layers)
    return [each._experts for each in mixtures if each is not None]


@pytest.mark.parametrize("dtype", halves.DTYPES, ids=str)
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_keep_their_16_bits(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a checkpoint stores them; answers are those of the same numbers in float32."""
    monkeypatch.setattr(halves, "multiplies_pairs", lambda: False)
    for module in (quantised, resolving):
        monkeypatch.setattr(module, "computes_in_bfloat16", lambda: False)
    model = mixture_in(dtype, MIXTURES[name], tmp_path)
    found = experts_of(decoder_of(model))
    assert found
    for experts in found:
        for matrices in (experts.gate_up, experts.down):
            assert isinstance(matrices, Halves)
            assert matrices.panels.dtype == dtype
            assert matrices.panels.dim() == 3
    said = tokens_of(model)
    file = model / "model.safetensors"
    save_file({name: each.float() for name, each in load_file(file).items()}, file, {"format": "pt"})
    assert not isinstance(experts_of(decoder_of(model))[0].down, Halves)
    assert said == tokens_of(model)
    assert len({token for tokens in said for token in tokens}) > 3


def test_experts_of_several_dtypes_are_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is rounded, whichever of them has more bits."""
    monkeypatch.setattr(halves, "multiplies_pairs", lambda: False)
    model = mixture_in(torch.float16, MIXTURES["qwen3_moe"], tmp_path)
    file = model / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.experts.5.up_proj.weight"
    tensors[name] = torch.randn(tensors[name].shape)
    save_file(tensors, file, {"format": "pt"})
    first, last = experts_of(decoder_of(model))
    assert isinstance(first.gate_up, torch.Tensor)
    assert torch.equal(first.gate_up[5].chunk(2)[1], tensors[name])
    assert isinstance(last.gate_up, Halves)


@needs_pairs
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_multiplied_in_pairs(name: str, tmp_path: Path) -> None:
    model = mixture_in(torch.bfloat16, MIXTURES[name], tmp_path)
    found = experts_of(decoder_of(model))
    assert found
    assert all(each.gate_up.in_pairs and each.down.in_pairs for each in found)
    said = tokens_of(model)
    assert len({token for tokens in said for token in tokens}) > 3


@needs_pairs
def test_bfloat16_is_multiplied_in_pairs(tiny_model: Tiny, tmp_path: Path) -> None:
    """Rows are rounded before products and nowhere else; `--dtype` has what is asked for."""
    model = plain_in(torch.bfloat16, tiny_model, tmp_path)
    decoder = decoder_of(model)
    assert decoder.weights.dtype == torch.float32
    assert {layer.attention.codes for layer in decoder.spec.layers} == {"float16"}
    products = [each for layer in decoder._layers for each in products_of(layer).values()]
    linears = [each for each in (*products, decoder._head.product) if isinstance(each, Dense | HalvesLinear)]
    assert len(linears) > 4 * len(decoder._layers)
    assert all(isinstance(each, HalvesLinear) and each.weight.in_pairs for each in linears)
    exact, plain = decoder_of(model, dtype="float32"), decoder_of(model, dtype="bfloat16")
    assert not exact._head.product.weight.in_pairs
    assert isinstance(plain._head.product, Dense)
    assert torch.equal(decoder._embedding.table.rows(TOKENS), exact._embedding.table.rows(TOKENS))
    x = torch.randn(5, decoder.spec.hidden_size)
    assert torch.equal(decoder._head.product(x).bfloat16(), decoder._head.product(x.bfloat16().float()).bfloat16())
    torch.testing.assert_close(
        decoder._head.product(x), exact._head.product(x.bfloat16().float()), rtol=1e-5, atol=1e-5
    )
    said = tokens_of(model)
    assert said == tokens_of(model, chunk_size=3)
    assert len({token for tokens in said for token in tokens}) > 3


def test_what_is_asked_for_is_done_to_16_bits_too(tiny_model: Tiny, tmp_path: Path) -> None:
    model = plain_in(torch.float16, tiny_model, tmp_path)
    config = EngineConfig(model=model, quantization="int8", cache=CacheConfig(num_blocks=16))
    decoder = Engine(config)._decoder
    found = [*products_of(decoder._layers[0]).values(), decoder._head.product, decoder._embedding.table]
    assert not any(isinstance(each, HalvesLinear | HalvesTable) for each in found)


def in_gguf(folder: Path, case: object, kinds: dict[str, str]) -> Path:
    return write_gguf(case.build(folder / "source"), folder / "model.gguf", kind=kinds)  # type: ignore[attr-defined]


def test_tensors_of_16_bits_of_a_gguf_file_stay_so(tmp_path: Path) -> None:
    kinds = {
        "": "Q4_K",
        "attn_v": "F16",
        "ffn_down": "BF16",
        "ffn_norm": "F16",
        "token_embd": "F16",
        "output.weight": "BF16",
    }
    decoder = decoder_of(in_gguf(tmp_path, LLAMA, kinds))
    found = {type(product): product for product in products_of(decoder._layers[0]).values()}
    assert found[HalvesLinear].weight.panels.dtype == torch.bfloat16
    queries, keys_and_values = [type(each) for each in found[SideBySide].linears], found[SideBySide].linears
    assert queries == [TiledLinear, HalvesLinear]
    assert keys_and_values[1].weight.panels.dtype == torch.float16
    assert decoder._head.product.weight.panels.dtype == torch.bfloat16
    assert decoder._embedding.table.weight.panels.dtype == torch.float16


def test_a_tied_head_is_in_memory_once(tmp_path: Path) -> None:
    decoder = decoder_of(in_gguf(tmp_path, TIED, {"": "Q4_K", "token_embd": "F16"}))
    assert decoder._head.product.weight is decoder._embedding.table.weight
    numbers = torch.arange(decoder.spec.vocab_size)
    rows = decoder._embedding.table.weight.rows(numbers)
    x = torch.randn(3, rows.shape[1])
    torch.testing.assert_close(decoder._head.product(x), x @ rows.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.double()], ids=["float32", "float64"])
def test_a_result_goes_where_it_is_asked_for(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    linear = HalvesLinear(halves.packed(torch.randn(20, 8).half()), torch.randn(20))
    x, out = torch.randn(3, 8), make(torch.zeros(3, 20))
    assert linear(x, out=out) is out
    assert torch.equal(out, make(linear(x)))
    residual = torch.ones(3, 20)
    assert linear.onto(residual, x) is None
    torch.testing.assert_close(residual, 1 + linear(x))
    gate, up = linear(x).chunk(2, dim=1)
    torch.testing.assert_close(linear.gated(x), torch.nn.functional.silu(gate) * up)
