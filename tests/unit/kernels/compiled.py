# mypy: allow-untyped-calls
"""Compiles kernels for Hopper in a process without a GPU, as passes and checks launch them; none runs.

    python -O -m tests.unit.kernels.compiled passes|checks|broken [NAME...]

Prints as JSON, for each program, how many variants it asked for first, and what is wrong: [kernel, variant, message].

A program is all passes of a family's case, or one check of a module `*_checks`: a new case or check is compiled too. What is
launched depends on shapes alone, so contents are unset memory, and -O drops the checks' assertions about them.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.runtime import driver

from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.families import read_model_spec
from engine.formats.fp8 import FP8_WHILE_LOADING, Fp8, Scales
from engine.formats.gguf import GgufBlocks
from engine.formats.int4 import INT4_WHILE_LOADING
from engine.formats.mxfp4 import MXFP4
from engine.formats.packed import Awq, Gptq
from engine.formats.product import Format
from engine.formats.quantization import EVERY, Quantization
from engine.kernels import device, launch, triton_linear, triton_norm
from engine.kernels.codes import KINDS, LATENT_KINDS, Kind
from engine.kernels.quantised import groups
from engine.spec.model import ModelSpec
from kvtransfer.cuda.mover import Move
from tests.unit.engine.families import dense, experts, hybrids
from tests.unit.engine.families.case import Case
from tests.unit.engine.launches import NUM_BLOCKS, PASSES, chunks
from tests.unit.kernels import references, triton_checks
from tests.unit.kernels.compiling import HopperDriver
from tests.unit.kernels.keys import Keys
from tests.unit.kernels.resources import resources_of

Programs = dict[str, Callable[[], None]]

HOPPER = device.Device(processors=132, has_tma=True, is_hopper=True)
SHARED_BYTES = 227 << 10  # of a program, on Hopper
SPILLED_BYTES = 96  # of a thread, at most: some numbers are kept across a loop, more would be read in it
NO_KERNELS = {"graph_checks"}  # it checks whole passes
# Real heads over few features: what a program keeps depends on them.
REAL_HEADS = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 32, "num_key_value_heads": 8}
REAL = {
    "llama, real heads": Case(name="llama", config="LlamaConfig", fields=REAL_HEADS | {"head_dim": 128}),
    "gpt_oss, real heads": Case(name="gpt_oss", config="GptOssConfig", fields=REAL_HEADS | {"head_dim": 64}),
    "gemma2, real heads": Case(name="gemma2", config="Gemma2Config", fields=REAL_HEADS | {"head_dim": 256}),
    "gemma4, real heads": Case(
        name="gemma4",
        config="Gemma4TextConfig",
        fields=dense.GEMMA_4 | REAL_HEADS | {"head_dim": 256, "global_head_dim": 512},
    ),
    "mimo_v2_flash, real heads": Case(
        name="mimo_v2_flash",
        config="MiMoV2FlashConfig",
        fields=experts.MIMO | REAL_HEADS | {"head_dim": 192, "v_head_dim": 128, "num_key_value_heads": 4},
    ),
    "gemma3n, real sizes": Case(
        name="gemma3n",
        config="Gemma3nTextConfig",
        fields=dense.GEMMA_3N
        | {
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "activation_sparsity_pattern": [0.95] + [0.0] * 6,
            "head_dim": 256,
            "num_attention_heads": 8,
        },
    ),
}
REAL_LATENTS = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
}
REAL |= {
    "deepseek_v2, real heads": Case(
        name="deepseek_v2",
        config="DeepseekV2Config",
        fields=REAL_LATENTS
        | {"num_attention_heads": 16, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": None},
    ),
    "glm4_moe_lite, real heads": Case(
        name="glm4_moe_lite",
        config="Glm4MoeLiteConfig",
        fields=REAL_LATENTS
        | {"num_attention_heads": 20, "qk_nope_head_dim": 192, "v_head_dim": 256, "q_lora_rank": 64},
    ),
    "deepseek_v32, real heads": Case(
        name="deepseek_v32",
        config="DeepseekV32Config",
        fields=REAL_LATENTS
        | {"num_attention_heads": 128, "q_lora_rank": 64, "index_topk": 64, "num_hidden_layers": 2}
        | {"n_group": 1, "topk_group": 1},
    ),
}
REAL_EXPERTS = REAL_HEADS | {"num_local_experts": 4, "num_experts_per_tok": 3}
QUANTISED: dict[str, tuple[Case, Format]] = {
    f"{case.name}, {name}": (case, format)
    for case, formats in (
        (
            REAL["llama, real heads"],
            {
                "int4": INT4_WHILE_LOADING,
                "awq": Awq(group=128, has_zeros=True),
                "gptq of 8 bits": Gptq(stored_bits=8, group=128, less_one=True, has_order=False),
                "Q4_K": GgufBlocks("Q4_K"),
                "Q6_K": GgufBlocks("Q6_K"),
                "fp8": FP8_WHILE_LOADING,
                "fp8 in blocks": Fp8(scales=Scales.BLOCK),
            },
        ),
        (
            Case(name="mixtral", config="MixtralConfig", fields=REAL_EXPERTS | {"head_dim": 128}),
            {
                "int4": INT4_WHILE_LOADING,
                "Q4_K": GgufBlocks("Q4_K"),
                "fp8": FP8_WHILE_LOADING,
                "fp8 in blocks": Fp8(scales=Scales.BLOCK),
            },
        ),
        (
            Case(name="gpt_oss", config="GptOssConfig", fields=REAL_EXPERTS | {"head_dim": 64}),
            {"mxfp4": MXFP4, "int4": INT4_WHILE_LOADING},
        ),
    )
    for name, format in formats.items()
}


class Compiler:
    """Compiles each variant once, and remembers what is wrong: also launches whose key has another program."""

    def __init__(self, look: Callable[[Any], None]) -> None:
        self._look = look
        self._seen: set[tuple[str, str]] = set()
        self._keys = Keys()
        self.count = 0
        self.wrong: list[tuple[str, str, str]] = []

    def launch(self, kernel: Any, grid: object, variant: object, *arguments: Any, **options: Any) -> None:
        """Takes the place of `Kernel.launch`."""
        name = kernel.function.__name__
        key = (name, f"{variant} {options}")
        if apart := self._keys.wrong(kernel, variant, arguments, options):
            self.wrong.append((*key, f"one key for two programs: {apart}"))
        if variant is not None and key in self._seen:
            return
        self._seen.add(key)
        self.count += 1
        try:
            compiled = kernel.function.warmup(*arguments, grid=grid, **kernel._options, **options)
        except Exception as error:  # whatever a compiler raises
            self.wrong.append((*key, f"{type(error).__name__}: {error}"[-2000:]))
            return
        if compiled is None:
            return
        self._look(compiled)
        if compiled.metadata.shared > SHARED_BYTES:
            self.wrong.append((*key, f"{compiled.metadata.shared} bytes of shared memory, {SHARED_BYTES} are there"))
            return
        spilled = resources_of(compiled).spilled
        if spilled > SPILLED_BYTES and re.search(
            "fp16|bf16", str(compiled.src.signature)
        ):  # products of float32 have no tensor cores
            self.wrong.append((*key, f"{spilled} bytes spilled, at most {SPILLED_BYTES} may be"))


def passes(case: Case, kv_cache_dtype: str = "auto", format: Format | None = None) -> None:
    """Every pass of a model; no weight is loaded. `format`: of all its matrices."""

    def read(folder: Path, **asked: Any) -> ModelSpec:
        spec = read_model_spec(folder, **asked)
        return replace(spec, quantization=Quantization(groups=((EVERY, format),))) if format is not None else spec

    config = case.config_object()
    config.architectures = [case.architecture()]
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("engine.engine.model_fingerprint", return_value=""),
        mock.patch("engine.resolving.read_model_spec", read),
    ):
        config.save_pretrained(folder)
        asked = EngineConfig(
            model=Path(folder),
            dtype="bfloat16",
            max_model_len=case.max_model_len,
            cache=CacheConfig(num_blocks=NUM_BLOCKS, kv_cache_dtype=kv_cache_dtype),
        )
        engine = Engine(asked, load=lambda weights, folder: None)
        for parts in PASSES.values():
            engine.launch(chunks(parts, engine.layout))


def kinds_of(case: Case) -> tuple[Kind, ...]:
    """The kinds of codes that a case's layers may keep."""
    return LATENT_KINDS if "kv_lora_rank" in case.fields else tuple(KINDS)


def check(module: str, name: str) -> None:
    """One check of a module. The values are anything, and so is what it makes of them."""
    import_module(f"tests.unit.kernels.{module}").interpret(name)


def all_passes() -> Programs:
    """Of every family."""
    cases = {case.name: case for case in (*dense.CASES, *experts.CASES, *hybrids.CASES)} | REAL
    programs = {name: functools.partial(passes, case) for name, case in cases.items()}
    for name in (*REAL, "llama", "phi", "deepseek_v3"):
        for kind in kinds_of(cases[name]):
            programs[f"{name}, {kind} keys and values"] = functools.partial(passes, cases[name], kind)
    for name, (case, format) in QUANTISED.items():
        programs[name] = functools.partial(passes, case, format=format)
    programs["llama, int4, fp8 keys and values"] = functools.partial(
        passes, REAL["llama, real heads"], "fp8", INT4_WHILE_LOADING
    )
    return programs


def all_checks() -> Programs:
    """Of every kernel: all of each module `*_checks`."""
    found: Programs = {}
    for module in sorted({path.stem for path in Path(__file__).parent.glob("*_checks.py")} - NO_KERNELS):
        checks = import_module(f"tests.unit.kernels.{module}")
        for name in getattr(checks, "CHECKS", None) or checks.SPECS:
            found[f"{module} {name}"] = functools.partial(check, module, name)
    return found


def broken() -> Programs:
    """What the test of this module must see."""

    def norm() -> None:  # 3 is no power of two
        launch.Kernel(triton_norm._norm).launch((1,), "", *[torch.ones(3)] * 5, 1, 1e-6, 3, 3, 0, 0, False)

    def memory() -> None:
        x, weight = torch.empty(64, 4096, dtype=torch.bfloat16), torch.empty(4096, 4096, dtype=torch.bfloat16)
        triton_linear.launch_product(x, weight, None, torch.empty_like(x), triton_linear.Tiles(256, 256, 8, 4))

    def python() -> None:
        check("triton_checks", "no such kernel")

    def registers() -> None:
        with mock.patch.object(sys.modules[__name__], "SPILLED_BYTES", -1):
            triton_norm.rms_norm(torch.empty(4, 64).half(), torch.empty(64).half(), 1e-6)

    return {f"broken {function.__name__}": function for function in (norm, memory, python, registers)}


def _start(move: Move, *blocks: torch.Tensor | None) -> None:
    """Takes the place of what waits for the end."""
    move.start(*(None if ids is None else ids.tolist() for ids in blocks))


@contextmanager
def compiling(look: Callable[[Any], None] = lambda compiled: None) -> Iterator[Compiler]:
    """Within, kernels are compiled for Hopper and not launched, and comparisons compare nothing. `look` gets each variant."""
    compiler = Compiler(look)
    driver.set_active(HopperDriver())
    with ExitStack() as stack:
        for owner, name, value in (
            (device, "_INTERPRET", True),
            (device, "_NO_GPU", HOPPER),
            (launch, "_asked", set()),
            (torch.testing, "assert_close", lambda *given, **named: None),
            (groups, "_narrow", torch.Tensor.half),  # unset memory would keep 32 bits
            (references, "attention", lambda q, *given, **named: q),  # it takes its time
            (triton_checks, "_run", _start),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        launched = functools.partialmethod(lambda kernel, *given, **named: compiler.launch(kernel, *given, **named))
        stack.enter_context(mock.patch.object(launch.Kernel, "launch", launched))
        yield compiler


def run(
    programs: Programs, look: Callable[[Any], None] = lambda compiled: None
) -> dict[str, tuple[int, list[tuple[str, str, str]]]]:
    """Compile these programs, each variant in the first one that launches it."""
    found = {}
    with compiling(look) as compiler:
        for name, program in programs.items():
            torch.manual_seed(0)
            compiler.count, compiler.wrong = 0, []
            try:
                program()
            except Exception as error:  # of whatever was asked for
                compiler.wrong.append(("", "", f"{type(error).__name__}: {error}"))
            found[name] = (compiler.count, compiler.wrong)
    return found


def some_of(kind: str, wanted: Sequence[str]) -> Programs:
    """Those of these names; without any, all; of "2/14" every 14th from the third one on."""
    programs = {"passes": all_passes, "checks": all_checks, "broken": broken}[kind]()
    names = list(wanted) or list(programs)
    if part := re.fullmatch(r"(\d+)/(\d+)", names[0]):
        names = list(programs)[int(part[1]) :: int(part[2])]
    return {name: program for name, program in programs.items() if name in names}


if __name__ == "__main__":
    if __debug__:
        sys.exit("run it with -O: checks would compare what nobody computed")
    torch.set_num_threads(1)
    kind, *wanted = sys.argv[1:]
    print(json.dumps(run(some_of(kind, wanted))))
