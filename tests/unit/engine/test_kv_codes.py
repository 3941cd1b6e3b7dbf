"""Keys and values as codes: however the work is cut up, the tokens are the same; blocks of two kinds never meet."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from common.pages import KVLayout, PagePart
from engine.cache.pages import part_views
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kernels.codes import KINDS as DTYPES
from engine.kernels.codes import LATENT_KINDS, coded, decoded, turned
from engine.spec.model import UnsupportedModelError
from engine.weights.loader import CheckpointError
from gateway.placement.agreement import kv_name
from kvtransfer.plan import LayoutMismatchError, plan_copies
from tests.models import VOCAB_SIZE
from tests.unit.engine.families import hybrids
from tests.unit.engine.families.catalogue import CASES
from tests.unit.engine.formats.checkpoints import compressed, fp8_tensor, written
from tests.unit.engine.generate import Generator, handed_over, new_sequence
from tests.unit.engine.tables import blocks_of_tokens

KINDS = ("float16", *DTYPES)
LATENT = ("glm4_moe_lite", "deepseek_v2")  # families whose heads share latents
CHOOSING = "glm_moe_dsa"  # its indexer's keys are as large as the rotated ones, and stay numbers, too
FAMILIES = ("llama", "mistral", "qwen3", *LATENT, CHOOSING)


def of_kinds(*families: str, kinds: tuple[str, ...] = KINDS) -> pytest.MarkDecorator:
    """Each family with each kind of codes that it may keep."""
    pairs = ((family, kind) for family in families for kind in kinds)
    return pytest.mark.parametrize(
        ("family", "kind"),
        [(family, kind) for family, kind in pairs if kind in LATENT_KINDS or family not in (*LATENT, CHOOSING)],
    )


LENGTHS = (1, 16, 17, 70)
PART = PagePart(layers=2, planes=2, heads=2, dim=1, dtype="float32")

Start = Callable[[str, str], Engine]


def prompt_of(length: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def engine_of(folder: Path, kind: str, **options: object) -> Engine:
    """Its pool starts full of NaN: what was never written must never matter."""
    nan = partial(torch.full, fill_value=255, dtype=torch.uint8)
    config = EngineConfig.of(model=folder, num_blocks=80, kv_cache_dtype=kind, **options)

    def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        pool = nan((*shape[:-1], shape[-1] * dtype.itemsize)).view(dtype)
        return pool

    return Engine(config, allocate=allocate)


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's checkpoint."""
    names = (*LATENT, CHOOSING)
    latent = {case.name: case.build(tmp_path_factory.mktemp(case.name)) for case in CASES if case.name in names}
    return lambda family: latent.get(family) or tiny_model(family)


@pytest.fixture(scope="module")
def start(tiny: Callable[[str], Path]) -> Start:
    """An engine, started once."""
    started: dict[tuple[str, str], Engine] = {}

    def engine(family: str, kind: str) -> Engine:
        if (family, kind) not in started:
            started[family, kind] = engine_of(tiny(family), kind)
        return started[family, kind]

    return engine


@pytest.mark.quick
@of_kinds(*FAMILIES)
def test_alone_in_chunks_in_a_batch_with_a_cached_prefix_and_once_more(start: Start, family: str, kind: str) -> None:
    engine, prompts = start(family, kind), [prompt_of(length) for length in LENGTHS]
    alone = [Generator(engine).run([new_sequence("a", prompt)])[0] for prompt in prompts]
    for chunk_size in (512, 13):
        generator = Generator(engine, chunk_size=chunk_size)
        assert generator.run([new_sequence(f"r{index}", prompt) for index, prompt in enumerate(prompts)]) == alone
        again = new_sequence("again", prompts[-1])
        assert generator.run([again]) == [alone[-1]]
        assert again.num_cached == 64
    # Preempted after five tokens: these are computed again as a part of the prompt.
    resumed = new_sequence("b", [*prompts[-1], *alone[-1][:5]], max_tokens=7)
    assert Generator(engine).run([resumed]) == [alone[-1][5:]]


@of_kinds("llama", *LATENT)
def test_most_tokens_are_those_of_unquantised_ones(start: Start, family: str, kind: str) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    sequences = ([new_sequence(f"r{index}", prompt) for index, prompt in enumerate(prompts)] for _ in range(2))
    exact, rounded = (
        Generator(start(family, name)).run(some) for name, some in zip(("auto", kind), sequences, strict=True)
    )
    assert sum(ours[0] == theirs[0] for ours, theirs in zip(exact, rounded, strict=True)) >= 3


@of_kinds("llama", LATENT[0])
def test_blocks_are_handed_over_with_their_digests(
    start: Start, tiny: Callable[[str], Path], family: str, kind: str
) -> None:
    prefill, decode, prompt = start(family, kind), engine_of(tiny(family), kind), prompt_of(37)
    expected = Generator(prefill).run([new_sequence("a", prompt)])[0]
    assert handed_over(prefill, decode, prompt) == expected


def test_blocks_of_two_kinds_never_meet(start: Start) -> None:
    layouts = [start("llama", kind).layout for kind in ("auto", *KINDS)]
    assert [layout.dtype for layout in layouts] == ["float32", "float16", "float8_e4m3fn", "uint8", "uint8"]
    assert [kv_name(layout) for layout in layouts] == ["float32", "float16", "fp8", "int8", "int4"]
    assert [layout.block_bytes for layout in layouts] == [8192, 4096, 2048, 2560, 1536]
    for source in layouts:
        for destination in layouts:
            if source != destination:
                with pytest.raises(LayoutMismatchError, match=r"dtype is|parts here|dtype of part"):
                    plan_copies(source, destination)


@of_kinds("llama", LATENT[0], kinds=tuple(DTYPES))
def test_codes_of_numbers_in_two_dtypes_never_meet(tiny: Callable[[str], Path], family: str, kind: str) -> None:
    """Their pages may look alike, so the model's fingerprint tells them apart."""
    engines = [engine_of(tiny(family), kind, dtype=dtype) for dtype in ("float32", "bfloat16", "float32")]
    assert len({engine.layout for engine in engines}) == (1 if family == "llama" else 2)
    first, other, again = (engine.fingerprint for engine in engines)
    assert first == again != other


@pytest.mark.parametrize("family", LATENT)
def test_latents_become_codes_and_their_rotated_keys_stay(start: Start, family: str) -> None:
    (plain,) = start(family, "auto").layout.pages
    latents, rotated = start(family, "fp8").layout.pages
    codes, beside, scales = start(family, "int8").layout.pages
    assert latents.dim + rotated.dim == plain.dim
    assert (latents.dtype, rotated.dtype) == ("float8_e4m3fn", plain.dtype)
    assert (codes.dtype, beside, scales.dtype, scales.dim) == ("uint8", rotated, "float32", 1)
    assert len({start(family, kind).fingerprint for kind in ("auto", *LATENT_KINDS)}) == 3


@pytest.mark.parametrize("names", ["in the projections", "one of both", "of keys alone"])
def test_the_factor_of_latents_is_that_of_the_checkpoints_keys(
    tmp_path: Path, tiny: Callable[[str], Path], names: str
) -> None:
    scales = NAMES.get(names) or {"self_attn.k_scale": torch.tensor(0.02)}
    folder, prompt = with_scales(tmp_path / "model", tiny(LATENT[0]), scales), prompt_of(37)
    pages = []
    for source in (folder, tiny(LATENT[0])):
        engine = engine_of(source, "fp8")
        Generator(engine).start(sequence := new_sequence("a", prompt))
        pages.append(part_views(engine.kv, engine.layout)[0][blocks_of_tokens(sequence)[0], 0].float())
    torch.testing.assert_close(pages[0] * 0.02, pages[1], rtol=0.13, atol=0.02)
    assert not torch.equal(*pages)


def test_layers_with_a_window_may_stay_as_they_are(tmp_path: Path) -> None:
    (case,) = (case for case in CASES if case.name == "gemma3")
    folder = case.build(tmp_path)
    whole = engine_of(folder, "fp8", max_model_len=case.max_model_len)
    some = engine_of(folder, "fp8", kv_cache_dtype_skip_layers="sliding_window", max_model_len=case.max_model_len)
    assert whole.fingerprint != some.fingerprint
    assert [part.dtype for part in whole.layout.pages] == ["float8_e4m3fn"]
    assert [part.dtype for part in some.layout.pages] == ["float8_e4m3fn", "float32"]
    assert [part.dtype for part in whole.layout.groups[0].parts] == ["float8_e4m3fn"]
    assert not some.layout.groups, "numbers of a layer need more than a block of codes"
    assert (
        sum(part.layers for part in some.layout.pages)
        == whole.layout.num_layers + whole.layout.groups[0].parts[0].layers
    )
    prompt = prompt_of(70)
    alone = Generator(some).run([new_sequence("a", prompt)])
    assert Generator(some, chunk_size=13).run([new_sequence("a", prompt)]) == alone


def test_states_stay_as_they_are_beside_codes(tmp_path: Path) -> None:
    engine = engine_of(hybrids.QWEN_3_5.build(tmp_path), "fp8")
    assert [part.dtype for part in engine.layout.pages] == ["float8_e4m3fn"]
    assert {(part.dtype, part.per_token) for part in engine.layout.groups[0].parts} == {("float32", False)}
    prompt = prompt_of(70)
    alone = Generator(engine).run([new_sequence("a", prompt)])
    assert Generator(engine, chunk_size=13).run([new_sequence("a", prompt)]) == alone


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        (
            "mistral",
            {"kind": "fp8", "kv_cache_dtype_skip_layers": "sliding_window"},
            "kv_cache_dtype = fp8 is not supported for this model: no layer keeps keys and values but those with",
        ),
        ("llama", {"kind": "bfloat16"}, "kv_cache_dtype = bfloat16, but the model computes in float32"),
        (
            "llama",
            {"kind": "float32", "dtype": "bfloat16"},
            "kv_cache_dtype = float32, but the model computes in bfloat16",
        ),
        ("llama", {"kind": "float16", "dtype": "bfloat16"}, "leave it out, or give it dtype = float32"),
        ("llama", {"kind": "int2"}, "kv_cache_dtype must be one of auto, bfloat16, fp8, .* not 'int2'"),
        ("deepseek_v2", {"kind": "int4"}, r"kv_cache_dtype = int4 is not .*latents \(MLA\).* Give it int8 or fp8"),
        ("llama", {"kind": "fp8", "kv_cache_dtype_skip_layers": "0"}, "must be sliding_window or nothing, not '0'"),
    ],
)
def test_what_can_t_be_kept_so_is_refused_by_name(
    tmp_path: Path, name: str, options: dict[str, str], says: str
) -> None:
    (case,) = (case for case in CASES if case.name == name)
    with pytest.raises((ValueError, UnsupportedModelError), match=says):
        engine_of(case.build(tmp_path), **options)


# -- scales of a checkpoint -----------------------------------------------------------------------------------------------


def with_scales(folder: Path, source: Path, scales: dict[str, torch.Tensor]) -> Path:
    """A copy of a checkpoint with further tensors in each layer."""
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    weights = load_file(source / "model.safetensors")
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    more = {f"model.layers.{layer}.{name}": value.clone() for layer in range(layers) for name, value in scales.items()}
    save_file(weights | more, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


NAMES = {
    "beside attention": {"self_attn.k_scale": torch.tensor(0.02), "self_attn.v_scale": torch.tensor(0.01)},
    "in the projections": {
        "self_attn.k_proj.k_scale": torch.tensor([0.02]),
        "self_attn.v_proj.v_scale": torch.tensor([0.01]),
        "self_attn.q_scale": torch.tensor([1.0]),
    },
    "one of both": {"self_attn.kv_scale": torch.tensor([0.02])},
}


@pytest.mark.parametrize("names", NAMES)
def test_the_checkpoints_scales_are_used(tmp_path: Path, tiny_model: Callable[[str], Path], names: str) -> None:
    folder, prompt = with_scales(tmp_path / "model", tiny_model("llama"), NAMES[names]), prompt_of(37)
    engine, generator = engine_of(folder, "fp8"), None
    written = {}
    for name, each in (("scaled", engine), ("plain", engine_of(tiny_model("llama"), "fp8"))):
        generator = Generator(each)
        sequence = new_sequence("a", prompt)
        generator.start(sequence)
        written[name] = each.kv[blocks_of_tokens(sequence)[0]].float()
    value_scale = 0.02 if names == "one of both" else 0.01
    factors = torch.tensor([0.02, value_scale]).view(1, 2, 1, 1, 1)
    # In the first layer both quantise the same numbers.
    torch.testing.assert_close(
        (written["scaled"] * factors)[0], written["plain"][0], rtol=0.13, atol=0.02, check_stride=False
    )
    assert not torch.equal(written["scaled"], written["plain"])
    Generator(engine_of(folder, "auto")).run([new_sequence("a", prompt)])  # they are no part of other kinds


def test_scales_must_be_whole_and_positive(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    half = with_scales(tmp_path / "half", tiny_model("llama"), {"self_attn.k_scale": torch.tensor(0.02)})
    with pytest.raises(CheckpointError, match=r"missing weights .*layers\.0\.self_attn\.v_scale"):
        engine_of(half, "fp8")
    zero = with_scales(tmp_path / "zero", tiny_model("llama"), {"self_attn.kv_scale": torch.tensor(0.0)})
    with pytest.raises(UnsupportedModelError, match=r"layers.0.self_attn.k_scale and v_scale must be positive"):
        engine_of(zero, "fp8")


def test_auto_is_what_the_checkpoint_says(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    scheme = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
    config = compressed("tensor")["quantization_config"] | {"kv_cache_scheme": scheme}
    plain = written(tiny_model("llama"), tmp_path / "fp8", fp8_tensor, {"quantization_config": config})
    folder = with_scales(tmp_path / "scaled", plain, NAMES["beside attention"])
    kept = {kind: engine_of(folder, kind).layout.dtype for kind in ("auto", "int8", "fp8")}
    assert kept == {"auto": "float8_e4m3fn", "int8": "uint8", "fp8": "float8_e4m3fn"}


@pytest.mark.parametrize(
    ("kind", "dim", "scales"), [("int8", 16, PART), ("int4", 8, replace(PART, dim=2, dtype="bfloat16"))]
)
def test_scales_take_a_page_part(start: Start, kind: str, dim: int, scales: PagePart) -> None:
    layout = start("llama", kind).layout
    assert layout == KVLayout.of([replace(scales, dim=dim, dtype="uint8"), scales], num_blocks=80, block_size=16)


def test_int4_is_known_by_the_models_fingerprint(start: Start) -> None:
    """Its codes have int8's dtype, so the root of blocks' hashes tells them apart by the model."""
    assert len({start("llama", kind).fingerprint for kind in ("auto", *KINDS)}) == 5


@pytest.mark.parametrize(("dim", "size"), [(64, 64), (80, 16), (24, 8)])
def test_turning_spreads_a_feature_evenly_and_keeps_products(dim: int, size: int) -> None:
    matrix = turned(torch.eye(dim))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim))
    assert matrix.abs().amax(dim=1).allclose(torch.tensor(size**-0.5))
    assert ((matrix != 0).sum(dim=1) == size).all()


def test_int4_is_half_a_step_off_at_most() -> None:
    """Also beside an offset that is larger than what differs; a head of equal numbers is exact."""
    numbers = torch.randn(3, 2, 4, 2, 32) + torch.tensor([0.0, 20.0, -3.0]).view(3, 1, 1, 1, 1)
    numbers[0, 0, 0, 0] = 0.25
    pages, codes = coded(numbers, "int4")
    found = decoded(pages, codes.scales, codes.factors.view(2, 1, 1, 1), torch.float32)
    least, most = numbers.aminmax(dim=-1, keepdim=True)
    # Scale and zero point have 8 significant bits.
    assert ((found - numbers).abs() <= 0.5 * (most - least) / 15 * 1.1 + 2.0**-8 * numbers.abs()).all()
    assert (found[0, 0, 0, 0] == 0.25).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_transformers_keeps_codes_too(tiny_model: Callable[[str], Path], kind: str) -> None:
    foreign, prompt = engine_of(tiny_model("mistral"), kind, model_impl="transformers"), prompt_of(70)
    alone = Generator(foreign).run([new_sequence("a", prompt)])
    assert Generator(foreign, chunk_size=13).run([new_sequence("a", prompt)]) == alone
    assert Generator(engine_of(tiny_model("mistral"), kind)).run([new_sequence("a", prompt)]) == alone


def test_release_010_knows_the_dtypes_of_codes() -> None:
    """It reads the heartbeats of workers that keep them; a dtype that it doesn't know is an error there."""
    known = {"float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "uint8"}
    assert {dtype for dtypes in DTYPES.values() for dtype in dtypes} <= known
