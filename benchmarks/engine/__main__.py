"""The engine's table: decode steps, first tokens, prefill, an offline batch, a process's start; each beside its floor.

    python -m benchmarks.engine --out DIR                                       on a Hopper card, in less than 8 minutes
    python -m benchmarks.engine --out DIR --shape demo --device cpu --quick     the same code in seconds; its figures say nothing

`benchmarks/README.md` says how to read what comes out.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import re
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from benchmarks.engine import cells, drafted
from benchmarks.engine.ceilings import measure_ceilings
from benchmarks.engine.cells import Bench, DoesNotFitError, PrefillRate
from benchmarks.engine.floors import Ceilings, ModelCost, upload
from benchmarks.engine.startup import start_process
from benchmarks.engine.step_profile import profile_cell
from benchmarks.engine.targets import CARD, REFERENCE, TARGETS
from benchmarks.engine.workload import Prompts
from benchmarks.environment import ROOT, card_of, clocks, describe, device_of
from benchmarks.kernels.__main__ import measure_kernels
from benchmarks.quality.accuracy import measure_accuracy, release_memory
from benchmarks.ranks.leading import leading
from benchmarks.results_format import Result, ResultsPage, notes_of, number
from benchmarks.weights.checkpoint import SHAPES, kept_checkpoint
from benchmarks.weights.drawn import DRAWN, draw_weights, write_config
from benchmarks.weights.heads import NUM_DRAFTS, has_layers, kept_head
from common.pages import KVLayout
from engine.cache.pages import part_views
from engine.config import KV_CACHE_DTYPES, CacheConfig, DraftConfig, EngineConfig
from engine.engine import Engine
from engine.families import read_model_spec
from engine.families.quantised import ONLINE
from engine.parallel.ranks import ONE_RANK, Ranks
from engine.weights.loader import load_weights

DEFAULT_SHAPE = "llama-3.1-8b"
SEED = 20_261_121
CLOCKS_READ_AFTER_S = 3.0  # from the start of a cell under full load
LAST_CELL_S = 30.0  # a cell that starts just before the limit may take this long
LAYER_BYTES = {"fp8": 1.0, "int8": 1.0, "int4": 0.5 + 2 / 128}  # one parameter, its scales included
STARTS = ("start_cold_cache", "start_warm_cache")


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 1 when a cell failed or there was no time for it, else 0.

    A missed target is no failure.
    """
    options = _parse(arguments)
    device = device_of("benchmarks.engine", options.device)
    facts = describe("benchmarks.engine", arguments, device, commit=options.commit)
    facts["model"] = options.shape if options.model or options.shape == "demo" else f"{options.shape}, random weights"
    card = card_of(device)
    if _compared(options, card) in TARGETS:
        facts["reference"] = REFERENCE[_compared(options, card)]
    stem = f"engine-{options.shape}" if options.shape in DRAWN else "engine"
    if card not in ("", CARD):
        stem += f"-{card}"
    if options.kv_cache_dtype != "auto":
        stem += f"-kv-{options.kv_cache_dtype}"
    if options.quantization != "auto":
        stem += f"-{options.quantization}"
        facts["model"] += f", --quantization {options.quantization}"
    if options.model_impl != "auto":
        stem += f"-{options.model_impl}"
        facts["model"] += f", by {options.model_impl}"
    several = options.ranks or options.stages
    if several:
        kind = "stages" if options.stages else "ranks"
        stem += f"-{_several(options)}"
        count, of_ranks = len(several) // options.width, f" of {options.width} ranks" * (options.width > 1)
        facts["model"] += f", {count} {kind}{of_ranks}"
        facts["floor"] = f"of all {kind}' cards together"
    notes = notes_of(stem) if several or options.shape in (DEFAULT_SHAPE, *DRAWN) else ""
    devices = "one device" if len(several) < 2 else f"{len(several)} devices"
    page = ResultsPage(options.out, stem, title=f"The engine on {devices}", facts=facts, notes=notes)
    is_drawn = options.shape in DRAWN and options.model is None
    cards = [] if device.type == "cpu" else [int(one) for one in several]
    load = "drawn" if is_drawn else "stored"
    size, are_stages = max(1, len(several)), bool(options.stages)
    with leading(cards, load=load, size=size, are_stages=are_stages, width=options.width) as ranks:
        run = Run(options, page, device, ranks)
        run.profile(options.profile) if options.profile else run.table()
    return 1 if run.failed else 0


class Run:
    """One run of the table, a cell after the other; what is measured is written at once."""

    def __init__(
        self, options: argparse.Namespace, page: ResultsPage, device: torch.device, ranks: Ranks = ONE_RANK
    ) -> None:
        self._ranks, self._processes = ranks, ranks.group.size * ranks.stage.count
        self._options, self._page, self._device = options, page, device
        self._started = time.monotonic()
        self._targets = TARGETS.get(_compared(options, card_of(device)), {})
        chosen = (*cells.QUICK, *drafted.QUICK) if options.quick else (*cells.FULL, *drafted.FULL)
        if options.shape not in ("demo", DEFAULT_SHAPE):  # heads are of these sizes
            chosen = tuple(cell for cell in chosen if not isinstance(cell, drafted.DraftCost))
        self._cells: dict[str, cells.Cell | drafted.Cell] = {cell.name: cell for cell in chosen}
        self._prompt = 48 if options.quick else 512  # tokens of the first prompt after a start
        self.failed = False  # a cell failed, or there was no time for it

    def table(self) -> None:
        """Measure every cell that `--cells` names, while `--limit-s` lasts."""
        wanted = [
            name for name in (*STARTS, *self._cells, "kernels", "accuracy") if re.search(self._options.cells, name)
        ]
        if not self._options.accuracy:
            wanted = [name for name in wanted if name != "accuracy"]
        model, ceilings = self._prepare()
        self._page.add(
            Result(name="copy_bandwidth", value=ceilings.bytes_per_s / 1e12, unit="TB/s", better="higher"),
            Result(name="read_bandwidth", value=ceilings.read_bytes_per_s / 1e12, unit="TB/s", better="higher"),
            Result(name="matmul_rate", value=ceilings.flops_per_s / 1e12, unit="TFLOP/s", better="higher"),
            Result(name="upload_bandwidth", value=ceilings.upload_bytes_per_s / 1e9, unit="GB/s", better="higher"),
        )
        if self._processes > 1:  # one engine of them
            self._cells = {name: cell for name, cell in self._cells.items() if not isinstance(cell, drafted.Cell)}
            wanted = [name for name in wanted if name in self._cells]
        if self._options.shape in DRAWN:  # a process of its own would need a checkpoint
            wanted = [name for name in wanted if name not in STARTS]
        self._guarded(STARTS, wanted, lambda: self._measure_starts(model, ceilings, wanted))
        # An engine that verifies drafts has decode kernels of its own.
        for drafter in ("", drafted.LOOKUP, *(NUM_DRAFTS if has_layers(model) else ())):
            chosen = [self._cells[name] for name in wanted if name in self._cells]
            if chosen := [cell for cell in chosen if getattr(cell, "drafter", "") == drafter]:
                bench = self._bench(model, ceilings, draft=self._draft(model, drafter))
                for cell in chosen:
                    self._measure(cell, bench)
                del bench
                release_memory()
        if self._device.type == "cuda":
            release_memory()
            self._guarded(("kernels",), wanted, lambda: self._add(measure_kernels(self._device, ceilings)))
        if "accuracy" in wanted:
            self._guarded(("accuracy",), wanted, self._measure_accuracy)
        if self._device.type == "cuda":
            self._page.state("after", clocks(self._device))
        self._page.state("duration", f"{self._elapsed():.0f} s")
        self._page.write()
        self._say(f"results in {self._options.out}")

    def profile(self, name: str) -> None:
        """Write where the time of one cell's passes goes."""
        profiled = {name: cell for name, cell in self._cells.items() if not isinstance(cell, drafted.Cell)}
        if name not in profiled:
            raise SystemExit(f"--profile {name}: known are {', '.join(profiled)}")
        model, ceilings = self._prepare()
        bench = self._bench(model, ceilings)
        text = asyncio.run(profile_cell(profiled[name], bench, read_model_spec(model)))
        (self._options.out / f"profile_{name}.txt").write_text(text)
        print(text, flush=True)

    def _prepare(self) -> tuple[Path, Ceilings]:
        model = self._options.model or _checkpoint(self._options.shape, self._options.checkpoints)
        self._say(f"model {model}")
        dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        ceilings = measure_ceilings(self._device, dtype, quick=self._options.quick)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._say(
            f"ceilings: copy {ceilings.bytes_per_s / 1e12:.2f} TB/s, read {ceilings.read_bytes_per_s / 1e12:.2f} TB/s, "
            f"product {ceilings.flops_per_s / 1e12:.0f} TFLOP/s, upload {ceilings.upload_bytes_per_s / 1e9:.0f} GB/s"
        )
        return model, ceilings

    def _draft(self, model: Path, drafter: str) -> DraftConfig | None:
        if drafter in NUM_DRAFTS:
            folder = kept_head(self._options.checkpoints, drafter, model)
            return DraftConfig(folder=folder, num_drafts=NUM_DRAFTS[drafter])
        return DraftConfig(num_drafts=drafted.LONGEST) if drafter else None

    def _bench(self, model: Path, ceilings: Ceilings, *, draft: DraftConfig | None = None) -> Bench:
        is_drawn = self._options.shape in DRAWN and self._options.model is None
        load = draw_weights if is_drawn else load_weights
        engine = Engine(self._config(model, draft=draft), load=load, ranks=self._ranks)
        fill(engine)
        self._say("engine ready")
        self._page.state("engine", _settings(engine))
        return Bench(
            engine=engine,
            ceilings=ceilings.times(self._processes),
            cost=ModelCost.of(
                read_model_spec(model),
                _dtype(self._device, read_model_spec(model).dtype),
                kv_bytes=self._position_bytes(engine.layout),
                layer_bytes=LAYER_BYTES.get(self._options.quantization),
                rate=2.0 if self._options.quantization == "fp8" else 1.0,
            ),
            prompts=Prompts(vocab_size=engine.vocab_size, seed=SEED),
            token_budget=engine.config.max_batch_tokens,
            stages=self._ranks.stage.count,
        )

    def _position_bytes(self, layout: KVLayout) -> int:
        """Bytes of one position on all cards; of stages without windows' entries, which this one's say nothing of."""
        if self._ranks.stage.count == 1:
            return position_bytes(layout) * self._ranks.group.size
        return sum(part.block_bytes(layout.block_size) for part in layout.whole_pages) // layout.block_size

    def _config(self, model: Path, *, draft: DraftConfig | None = None) -> EngineConfig:
        options = self._options
        return EngineConfig(
            model=model,
            draft=draft,
            model_impl=options.model_impl,
            device=options.device,
            dtype=_dtype(self._device, "auto"),
            quantization=options.quantization,
            max_batch_tokens=options.max_batch_tokens,
            max_sequences=options.max_sequences,
            tensor_parallel_size=self._ranks.group.size,
            num_threads=torch.get_num_threads(),
            cache=CacheConfig(
                kv_cache_dtype=options.kv_cache_dtype,
                kv_memory_bytes=options.kv_memory_mb << 20 if options.kv_memory_mb else None,
            ),
        )

    def _measure(self, cell: cells.Cell | drafted.Cell, bench: Bench) -> None:
        if self._out_of_time(cell.name):
            return
        if isinstance(cell, PrefillRate) and self._device.type == "cuda":
            threading.Timer(CLOCKS_READ_AFTER_S, lambda: self._page.state("in prefill", clocks(self._device))).start()
        try:
            seconds_left = self._options.limit_s + LAST_CELL_S - self._elapsed()
            self._add(asyncio.run(asyncio.wait_for(cell.measure(bench), seconds_left)))
        except DoesNotFitError as error:
            self._remark(f"{cell.name}: left out, {error}")
        except Exception as error:
            self._failed(cell.name, error)

    def _measure_starts(self, model: Path, ceilings: Ceilings, wanted: Sequence[str]) -> None:
        config = {**dataclasses.asdict(self._config(model)), "model": str(model)}
        cost = ModelCost.of(spec := read_model_spec(model), _dtype(self._device, spec.dtype))
        floor = upload(cost, ceilings)
        _read_all(model)
        with tempfile.TemporaryDirectory(prefix="triton-cache-") as cache:
            for name in STARTS:
                if name not in wanted and name == STARTS[1]:
                    continue  # the cold one fills the cache for the warm one
                start = start_process(config, prompt=self._prompt, triton_cache=Path(cache))
                results = [
                    Result(name=name, value=start.ready, unit="s", better="lower", floor=floor),
                    Result(name=f"{name}_imports", value=start.imported, unit="s", better="lower"),
                    Result(name=f"{name}_first_token", value=start.first_token, unit="s", better="lower"),
                ]
                self._add(results)

    def _measure_accuracy(self) -> None:
        release_memory()
        agreements = []
        for agreement in measure_accuracy(self._options.device, quick=self._options.quick, seed=SEED):
            agreements.append(agreement)
            self._say(str(agreement))
            self._add(agreement.results())
        self._page.state("accuracy", "; ".join(map(str, agreements)))
        if wrong := [agreement.name for agreement in agreements if agreement.gaps]:
            self.failed = True
            self._remark(f"accuracy: wrong tokens for {', '.join(wrong)}")

    def _guarded(self, names: Sequence[str], wanted: Sequence[str], measure: Callable[[], None]) -> None:
        if not any(name in wanted for name in names) or self._out_of_time(names[0]):
            return
        try:
            measure()
        except Exception as error:
            self._failed(names[0], error)

    def _add(self, results: Sequence[Result]) -> None:
        with_targets = []
        for result in results:
            if yardstick := self._targets.get(result.name):
                result = msgspec.structs.replace(result, target=yardstick.target, reference=yardstick.reference)
            with_targets.append(result)
        self._page.state("duration", f"{self._elapsed():.0f} s so far")
        self._page.add(*with_targets)
        for result in with_targets:
            bounds = f"(target {number(result.target)}, floor {number(result.floor)})"
            aim = {None: "", True: ", met", False: ", MISSED"}[result.met]
            self._say(f"{result.name} {number(result.value)} {result.unit}{aim} {bounds}")

    def _out_of_time(self, name: str) -> bool:
        if self._elapsed() < self._options.limit_s:
            return False
        self.failed = True
        self._remark(f"{name}: left out, the run's {self._options.limit_s:.0f} s were over")
        return True

    def _failed(self, name: str, error: Exception) -> None:
        self.failed = True
        traceback.print_exception(error)
        text = str(error).strip().splitlines()
        self._remark(f"{name}: failed, {type(error).__name__}: {text[-1] if text else ''}")

    def _remark(self, text: str) -> None:
        self._say(text)
        self._page.remarks.append(text)
        self._page.write()

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _say(self, text: str) -> None:
        print(f"[{self._elapsed():6.1f} s] {text}", flush=True)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for engine.json, engine.md and profiles")
    parser.add_argument(
        "--shape", default="llama-3.1-8b", help="a shape of benchmarks/weights/checkpoint.py or drawn.py, or demo: demo"
    )
    parser.add_argument(
        "--model", type=Path, help="a checkpoint of that shape; else one with random weights is written"
    )
    parser.add_argument("--checkpoints", type=Path, default=Path(tempfile.gettempdir()) / "baton-checkpoints")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--ranks", default="", help="a rank's card each, by number, the first 0: 0,1; on a CPU as many of anything"
    )
    parser.add_argument("--stages", default="", help="stages in place of ranks: a card each, as with these")
    parser.add_argument(
        "--width", type=int, default=1, help="ranks of each stage, whose cards are neighbours in --stages"
    )
    parser.add_argument("--quick", action="store_true", help="small cells, for a CPU")
    parser.add_argument("--cells", default="", help="regular expression: measure only the cells whose name it finds")
    parser.add_argument("--accuracy", action="store_true", help="compare greedy tokens with transformers, too")
    parser.add_argument("--limit-s", type=float, default=460.0, help="start no cell after this many seconds")
    parser.add_argument("--kv-memory-mb", type=int, help="the pool; default: what the worker takes")
    parser.add_argument(
        "--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES, help="what keys and values are kept as"
    )
    parser.add_argument(
        "--quantization", default="auto", choices=("auto", *ONLINE), help="what weights become while they are loaded"
    )
    parser.add_argument(
        "--model-impl", default="auto", choices=("auto", "transformers"), help="whose code computes the model"
    )
    parser.add_argument("--max-batch-tokens", type=int, default=8192, help="token budget of a pass")
    parser.add_argument("--max-sequences", type=int, default=256)
    parser.add_argument("--commit", default="", help="what to call this version; default: git's")
    parser.add_argument("--profile", default="", metavar="CELL", help="say where this cell's time goes, instead")
    options = parser.parse_args(arguments)
    options.shape = options.shape or (options.model.name if options.model else DEFAULT_SHAPE)
    if not options.model and options.shape not in ("demo", *SHAPES, *DRAWN):
        parser.error(f"--shape {options.shape}: known are demo, {', '.join((*SHAPES, *DRAWN))}")
    options.ranks, options.stages = (
        [one for one in each.split(",") if one] for each in (options.ranks, options.stages)
    )
    if options.ranks and options.stages:
        parser.error("--ranks beside --stages: one of both, or --width for the ranks of each stage")
    if options.width < 1 or len(options.stages) % options.width or (options.width > 1 and not options.stages):
        parser.error(f"--width {options.width}: a number that divides those of --stages is needed")
    if options.quick:
        options.kv_memory_mb = options.kv_memory_mb or 32
    return options


def _compared(options: argparse.Namespace, card: str) -> str:
    """The name of what figures are held against; "" on a card that the targets were not set for."""
    if card != CARD:
        return ""
    formats = [options.quantization] * (options.quantization != "auto")
    formats += [f"kv-{options.kv_cache_dtype}"] * (options.kv_cache_dtype != "auto")
    formats += [options.model_impl] * (options.model_impl != "auto")
    several = [_several(options)] * (len(options.ranks or options.stages) > 1)
    return " ".join((options.shape, *formats, *several))


def _several(options: argparse.Namespace) -> str:
    """The short name of ranks or stages, as options have it."""
    if not options.stages:
        return f"tp{len(options.ranks)}"
    return f"pp{len(options.stages) // options.width}" + f"-tp{options.width}" * (options.width > 1)


def _checkpoint(shape: str, folder: Path) -> Path:
    """The folder of a checkpoint of `shape`, written now unless an earlier run did."""
    if shape == "demo":
        return ROOT / "demo"
    target = folder / shape
    if shape in DRAWN:
        write_config(target, shape)
        return target
    return kept_checkpoint(folder, shape)


def _read_all(model: Path) -> None:
    """Bring the weights into the page cache."""
    buffer = bytearray(64 << 20)
    for file in model.glob("*.safetensors"):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def fill(engine: Engine) -> None:
    """Give every position keys and values, so that a context that was never computed attends to numbers."""
    for part in part_views(engine.kv, engine.layout):
        for blocks in part.split(256):
            if blocks.dtype == torch.uint8:
                blocks.random_(0, 256)  # int8, int4
            elif blocks.dtype == torch.float8_e4m3fn:
                blocks.copy_(torch.randn(blocks.shape, device=blocks.device))
            elif blocks.shape[-1] <= 2:  # int8's scales, int4's and its zero points
                blocks.fill_(0.01)
            else:
                blocks.normal_()


def position_bytes(layout: KVLayout) -> int:
    """Bytes of one position's keys and values, those in windows' entries included."""
    parts = [part for group in layout.groups for part in group.parts if part.per_token]
    windowed = sum(part.block_bytes(layout.block_size) for part in parts)
    return (layout.block_bytes + windowed) // layout.block_size


def _settings(engine: Engine) -> str:
    layout, config = engine.layout, engine.config
    return (
        f"{layout.dtype}, {layout.num_blocks} blocks of {layout.block_size} tokens, "
        f"{config.max_batch_tokens} tokens and {config.max_sequences} sequences a pass at most"
    )


def _dtype(device: torch.device, checkpoint: str) -> str:
    return "float32" if device.type == "cpu" else checkpoint


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
