# mypy: allow-untyped-calls
"""Engines on a GPU that isn't there (`card`): they start, load, capture graphs and compute passes of every kind; no kernel runs.

    python -m tests.unit.kernels.dry [PART/PARTS | NAME...]

What a launch asks of Triton is compared with its key: launches with one key get one program, whatever their arguments are.
"""

from __future__ import annotations

import itertools
import mmap
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.runtime import driver

from common.messages import Grammar
from engine.config import EngineConfig
from engine.engine import Chunk, Engine, Pass
from engine.families import read_model_spec
from engine.formats.product import Format
from engine.formats.quantization import EVERY, Quantization
from engine.kernels.attention import dispatch
from engine.kernels.collectives import Peers
from engine.kernels.collectives.group import gpu_group
from engine.kernels.sampling import triton_choose
from engine.lockstep import decode_config
from engine.parallel.ranks import Ranks
from engine.parallel.shared_memory import SharedMemoryGroup
from engine.spec.model import ModelSpec
from engine.step.warm import tables_from
from tests.gguf_files import write_gguf
from tests.models import build_tiny_model
from tests.unit.engine.families import dense, experts, foreign, hybrids
from tests.unit.engine.families.case import Case
from tests.unit.engine.formats.checkpoints import written
from tests.unit.engine.formats.forms import FORMS, GPT_OSS, in_mxfp4, source_of
from tests.unit.engine.formats.loading import Form
from tests.unit.engine.generate import new_sequence
from tests.unit.engine.launches import NUM_BLOCKS, PASSES, chunks
from tests.unit.engine.rank_drafts import config_of
from tests.unit.engine.tables import table_of
from tests.unit.kernels import compiled
from tests.unit.kernels.card import Card, made_up
from tests.unit.kernels.compiled import QUANTISED, kinds_of
from tests.unit.kernels.compiling import HopperDriver
from tests.unit.kernels.keys import Keys

# Real widths take a minute and more each, and launch nothing else.
REAL = {name: case for name, case in compiled.REAL.items() if name != "gemma3n, real sizes"}
FEWEST_LAUNCHES = 500  # of a start and its passes
GGUF_KINDS = ("BF16", "F16", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_XS")
# Lengths on both sides of what Triton looks at: 1, multiples of 16, and others.
LENGTHS: list[list[tuple[int, int, bool]]] = [
    [(start, 1, True)] * count for count, start in ((1, 5), (1, 15), (1, 255), (16, 16), (17, 100), (33, 7))
]
LENGTHS += [[(0, count, True)] for count in (1, 2, 15, 16, 17, 32, 65, 128, 256)]
LENGTHS += [[(start, count, True)] for start, count in ((16, 1), (240, 16), (1, 2), (15, 64))]
ANY_TOKEN = Grammar(text="start: <[0-300]>*")  # the first one is no text
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.3, "seed": 3},
    {"temperature": 0.9, "top_k": 40, "logprobs": 3, "repetition_penalty": 1.1},
    {"temperature": 0.8, "typical_p": 0.9, "min_p": 0.01},
    {"logit_bias": {1: 2.0}, "stop_token_ids": [2], "min_tokens": 3, "logprobs": 0},
    {"presence_penalty": 0.5},
    {},
)


class Launches:
    """Takes launches instead of a card. `token`: what each row of logits gets; None: none was usable."""

    def __init__(self, token: int | None = None) -> None:
        self.count = 0
        self._token = token
        self.wrong: dict[str, object] = {}  # a key of each fault
        self._keys = Keys()

    def __call__(
        self, kernel: Any, grid: object, variant: object, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self.count += 1
        if kernel is triton_choose._PICK and self._token is not None:
            _, _, token_ids, report, *_ = arguments
            report[:, 0], report[:, 1], token_ids[:] = 1, self._token, self._token
        if wrong := self._keys.wrong(kernel, variant, arguments, options):
            self.wrong[wrong] = variant


@contextmanager
def dry(launches: Launches) -> Iterator[Card]:
    """A Hopper card whose own prefill kernel is right."""

    def works(device: torch.device, dtype: torch.dtype, *heads: int) -> bool:
        return dtype.itemsize == 2 and heads[-1] in (64, 128)

    with (
        mock.patch.object(driver, "_active", HopperDriver()),
        mock.patch.object(dispatch, "hopper_works", works),
        made_up(launches) as card,
    ):
        yield card


def compute(engine: Engine, card: Card) -> None:
    """Passes of every kind, each launched while the one before runs; only events are waited for."""
    before = None
    with card.must_not_wait():
        for parts in (*PASSES.values(), *LENGTHS):
            own = [part for part in parts if sum(part[:2]) <= engine.max_model_len]
            if own and sum(count for _, count, _ in own) <= engine.config.max_batch_tokens:
                started = engine.launch(chunks(own, engine.layout))
                if before is not None:
                    _wait(before)
                before = started
    _sample(engine, card)


def _sample(engine: Engine, card: Card) -> None:
    """Prompts and two passes of decoding in flight, for each way to sample, masks and scores of prompts."""
    sequences = []
    for row, sampling in enumerate(SAMPLINGS):
        sequences.append(new_sequence(f"s{row}", [5 + row, 9, 11], **{"max_tokens": 9, **sampling}))
        tables = tables_from(engine.layout, len(SAMPLINGS) - 1, 1, number=row)
        sequences[-1].tables = [table_of([row]), *tables[1:]]
    for sequence in (sequences[0], sequences[-1]):
        sequence.grammar = ANY_TOKEN
    in_flight: list[tuple[list[Chunk], Pass]] = []
    with card.must_not_wait():
        for step in range(5):
            own = [sequence.schedule(sequence.num_unscheduled if step == 0 else 1) for sequence in sequences]
            in_flight.append((own, engine.launch(own)))
            if step:
                _deliver(*in_flight.pop(0))
        _deliver(*in_flight.pop(0))
        scored = new_sequence("scored", list(range(5, 45)), prompt_logprobs=3)
        scored.tables = tables_from(engine.layout, 7, 3)
        engine.launch([scored.schedule(20)]).wait()
        engine.launch([scored.schedule(20), sequences[1].schedule(1)]).wait()


def _wait(pass_: Pass) -> None:
    """No kernel ran, so the results are zeros, which say that no row's logits were usable."""
    results = [result for result in pass_.wait() if result is not None and not result.problem]
    assert not results, f"results are read before they are there: {results}"


def _deliver(chunks: list[Chunk], pass_: Pass) -> None:
    _wait(pass_)
    for chunk in chunks:
        chunk.sequence.finish(chunk)
        chunk.sequence.append(5)


class Ordered:
    """Words of the host on a card whose streams are one: whatever is behind a word begins when all before it is over."""

    def __init__(self, card: Card, memory: torch.Tensor) -> None:
        self._card = card
        card.pinned.take(memory)

    def wait(self, word: int, number: int) -> None:
        self._card.pinned.finish(self._card.pinned.begun())

    def write(self, word: int, number: int) -> None:
        self._card.pinned.finish(self._card.pinned.begun())


class Host:
    """The hosts of ranks that are all on this one: each says the same."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def exchange(self, own: bytes) -> list[bytes]:
        return [own] * self.size

    def meet(self) -> None: ...


class Led:
    """One further rank of an engine, which does what the first one says while that says it: no kernel waits for another."""

    def __init__(self, width: int, stages: int, card: Card, *, rank: int) -> None:
        """`width`: the ranks of a stage."""
        self._width, self._stages, self._card, self._rank = width, stages, card, rank
        self._memory = mmap.mmap(-1, SharedMemoryGroup.num_bytes(width * stages))
        self._engine: Engine | None = None
        self.ranks = replace(self._place(0), followers=self)

    def _place(self, rank: int) -> Ranks:
        ranks = Ranks() if self._width == 1 else Ranks(self._group(rank % self._width))
        if self._stages == 1:
            return ranks
        group = SharedMemoryGroup(self._memory, rank=rank, size=self._width * self._stages)
        return replace(ranks, stage=group.stage(partial(Ordered, self._card), width=self._width))

    def _group(self, rank: int) -> Peers:
        host: Any = Host(rank, self._width)
        here = torch.device("cuda")
        return gpu_group(host, here, lambda inbox, *_: [inbox.data_ptr()] * self._width, phase_bytes=1 << 20)

    def send(self, *frames: bytes) -> None:
        for frame in frames:
            if self._engine is None:
                self._engine = Engine(decode_config(frame), ranks=self._place(self._rank))
            else:
                with self._card.must_not_wait():
                    self._engine.follow(frame)

    def wait(self) -> None: ...

    def problem(self) -> str:
        return ""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A checkpoint, and what an engine of it is asked for."""

    build: Callable[[Path], Path]  # writes it into an empty folder
    asked: Mapping[str, Any]  # of EngineConfig
    format: Format | None = None  # of all matrices; nothing is loaded then
    ranks: int = 1
    stages: int = 1
    led: int = 0  # the further process that is there, too; 0: the last one
    drafter: str = ""  # of the first stage, or the only one: a name of `rank_drafts`, which writes the checkpoint

    def run(self, launches: Launches) -> None:
        """Raise CardError for what a card would refuse."""

        def read(folder: Path, **asked: Any) -> ModelSpec:
            spec = read_model_spec(folder, **asked)
            every = Quantization(groups=((EVERY, self.format),)) if self.format is not None else spec.quantization
            return replace(spec, quantization=every)

        sizes = {"dtype": "bfloat16", "num_blocks": NUM_BLOCKS, "max_sequences": 40}
        more: dict[str, Any] = {} if self.format is None else {"load": lambda weights, folder: None}
        with tempfile.TemporaryDirectory() as folder:
            drafting = config_of(self.drafter, Path(folder), layers=7) if self.drafter else None
            model = drafting.model if drafting is not None else self.build(Path(folder))
            with dry(launches) as card, mock.patch("engine.resolving.read_model_spec", read):
                config = EngineConfig.of(model=model, device="cuda", **sizes | self.asked)
                config = config if drafting is None else replace(config, draft=drafting.draft)
                if (processes := self.ranks * self.stages) > 1:
                    led = Led(self.ranks, self.stages, card, rank=self.led or processes - 1)
                    config, more["ranks"] = replace(config, tensor_parallel_size=self.ranks), led.ranks
                compute(Engine(config, **more), card)


def of_case(case: Case, format: Format | None = None, **asked: Any) -> Program:
    return Program(build=case.build, asked={"max_model_len": case.max_model_len, **asked}, format=format)


def of_form(form: Form) -> Program:
    def build(folder: Path) -> Path:
        source = source_of(form, lambda family: build_tiny_model(folder / "source", family), folder)
        return written(source, folder / "quantised", form.store, form.config, keeps=form.keeps)

    return Program(build=build, asked={})


def programs() -> dict[str, Program]:
    """Every family, and each format of weights and of keys and values."""
    cases = {case.name: case for case in (*dense.CASES, *experts.CASES, *hybrids.CASES)} | REAL
    found = {name: of_case(case) for name, case in cases.items()}
    found |= {case.name: of_case(case, model_impl=case.model_impl) for case in foreign.CASES}
    for name in ("llama", "mixtral", "qwen3_5", "phi"):
        found[f"{name} in float16"] = of_case(cases[name], dtype="float16")
        found[f"{name} in float32"] = of_case(cases[name], dtype="float32")
    for name in (*REAL, "phi", "deepseek_v3", "mixtral", "gemma3", "qwen3_5"):
        for kind in kinds_of(cases[name]):
            found[f"{name}, {kind} keys and values"] = of_case(cases[name], kv_cache_dtype=kind)
    for name, (case, format) in QUANTISED.items():
        found[name] = of_case(case, format)
        found[f"{name} in float16"] = of_case(case, format, dtype="float16")
    for name, format in itertools.product(
        (*REAL, "phi", "deepseek_v3", "mixtral", "gpt_oss", "qwen3_5"), ("fp8", "int4")
    ):
        found[f"{name}, {format} while loading"] = of_case(cases[name], quantization=format, kv_cache_dtype="fp8")
    for name in ("llama", "deepseek_v3", "qwen3_moe", "gpt_oss", "qwen3_5", "gemma3"):
        found[f"{name}, 2 ranks"] = replace(of_case(cases[name]), ranks=2)
    for name in ("llama", "deepseek_v3"):
        found[f"{name}, 2 stages"] = replace(of_case(cases[name]), stages=2)
        found[f"{name}, 2 stages of 2 ranks"] = replace(of_case(cases[name]), ranks=2, stages=2)
    for name in ("eagle3", "dflash", "draft_model"):
        found[f"{name} in the first of 2 stages"] = replace(of_case(cases["llama"]), stages=2, drafter=name)
    found["eagle3 in a first stage of 2 ranks"] = replace(
        of_case(cases["llama"]), ranks=2, stages=2, led=1, drafter="eagle3"
    )
    found["llama, a rank that samples, too"] = replace(of_case(cases["llama"]), ranks=2, stages=2, led=1)
    found["llama, 4 ranks in float32"] = replace(of_case(cases["llama"], dtype="float32"), ranks=4)
    found["phi, int8 keys and values, 2 ranks"] = replace(of_case(cases["phi"], kv_cache_dtype="int8"), ranks=2)
    is_cut = {"enable_expert_parallel": False}
    found["mixtral, 2 ranks, experts cut"] = replace(of_case(cases["mixtral"], **is_cut), ranks=2)
    for name in ("fp8", "int4"):
        found[f"llama, {name} while loading, 2 ranks"] = replace(of_case(cases["llama"], quantization=name), ranks=2)
    for name in ("awq", "gptq, order of activations"):
        found[f"checkpoint of {name}, 2 ranks"] = replace(of_form(FORMS[name]), ranks=2)
    found |= {f"checkpoint of {name}": of_form(form) for name, form in FORMS.items()}
    found["checkpoint of gpt-oss in mxfp4"] = Program(
        build=lambda folder: in_mxfp4(
            replace(GPT_OSS, fields={**GPT_OSS.fields, "intermediate_size": 96}).build(folder / "plain"),
            folder / "mxfp4",
        ),
        asked={},
    )
    wide = Case(name="llama", config="LlamaConfig", fields={"hidden_size": 256, "intermediate_size": 512})
    for kind in GGUF_KINDS:
        found[f"GGUF of {kind}"] = Program(
            build=lambda folder, kind=kind: write_gguf(wide.build(folder / "plain"), folder / "model.gguf", kind=kind),
            asked={},
        )
    return found


def run(wanted: Mapping[str, Program], tell: Callable[[str], object] = str) -> dict[str, str]:
    """What is wrong, by program; keys are compared over all of them. `tell` gets a line for each as it ends."""
    launches, wrong = Launches(), {}
    for name, program in wanted.items():
        before = launches.count
        try:
            program.run(launches)
            assert launches.count - before > FEWEST_LAUNCHES, "hardly anything was launched"
        except Exception:  # whatever a program raises
            wrong[name] = traceback.format_exc(limit=-8)
        tell(f"{name}: {launches.count - before} launches\n{wrong.get(name, '')}")
    return wrong | {what: f"one key for two programs: {key}" for what, key in launches.wrong.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    every = programs()
    names = sys.argv[1:] or ["0/1"]
    if part := re.fullmatch(r"(\d+)/(\d+)", names[0]):  # every so manieth, from this one on
        names = list(every)[int(part[1]) :: int(part[2])]
    wrong = run({name: every[name] for name in names}, partial(print, end="", flush=True))
    sys.exit("\n".join(f"{name}: {what}" for name, what in wrong.items()) or 0)
