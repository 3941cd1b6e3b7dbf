"""The load generator for OpenAI-compatible servers: `baton bench`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator

import httpx

from cli.bench.aliases import translated
from cli.bench.client import Sample, Target
from cli.bench.compare import compared
from cli.bench.files import check_writable, document, metadata_of, read, write
from cli.bench.load import more_fields
from cli.bench.report import progress_line, render, step_head, step_row, verdict
from cli.bench.results import Done, missed_already, summarize
from cli.bench.run import LoadGenerator, Run
from cli.bench.settings import BenchSettings
from cli.bench.steps import MaxSearch, Step, of_step, seed_of, steps_of
from cli.reach import Gateway
from cli.said import message_of
from common.settings import ConfigError
from services.runtime.loading import fail, load_settings

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
PROGRESS_EVERY_S = 0.5
BETWEEN_STEPS_S = 1.0  # the server drops abandoned requests meanwhile


def main() -> int:
    """Entry point; 1 when a request failed or no rate was within the objectives, 2 when nothing could be sent."""
    try:
        arguments, needless = translated(sys.argv[1:])
        settings = load_settings(BenchSettings, command="bench", arguments=arguments)
        if needless:
            print(f"baton: not needed here, ignored: {', '.join(needless)}", file=sys.stderr)
        if settings.action == "compare":
            return compare(settings.before, settings.after)
        steps = steps_of(settings)
        check(settings)
        server = settings.gateway()
        target = Target.of(server.url, PATHS[settings.endpoint], server.api_key, server.trusted)
        bench = Bench(settings, server.url, target, settings.served_model_name or first_model(server))
        return asyncio.run(bench.run(steps))
    except KeyboardInterrupt:  # before the load began
        return 130
    except (ConfigError, ValueError, OSError) as error:
        return fail(error)
    except httpx.HTTPError as error:
        return fail(server.silent(error))


def compare(before: str, after: str) -> int:
    """Print two results side by side. Raises ConfigError."""
    if not (before and after):
        raise ConfigError("two JSON results of --output are compared: baton bench compare A.json B.json")
    print(compared(read(before), read(after)))
    return 0


def check(settings: BenchSettings) -> None:
    """Check before any load for whatever would fail after it. Raises ConfigError."""
    metadata_of(settings)
    more_fields(settings)
    check_writable(settings)


def first_model(server: Gateway) -> str:
    """The first model in the server's list. Raises httpx.HTTPError and ConfigError."""
    with server.client(timeout_s=10) as client:
        answer = client.get("/v1/models")
    if answer.status_code != 200:
        said = message_of(answer.content)
        hint = "--api-key or --served-model-name?"
        raise ConfigError(f"{server.url}/v1/models: HTTP {answer.status_code}: {said}; {hint}")
    models = answer.json()["data"]
    if not models:
        raise ConfigError(f"{server.url} lists no model: give --served-model-name")
    return str(models[0]["id"])


class Bench:
    """A run: its steps in order, and their results. Ctrl-C or SIGTERM ends it and keeps what was measured."""

    def __init__(self, settings: BenchSettings, url: str, target: Target, model: str) -> None:
        self._settings, self._url, self._target, self._model = settings, url, target, model
        self._done: list[Done] = []
        self._search: MaxSearch | None = None
        self._sending: asyncio.Task[None] | None = None
        self._interrupted = False

    async def run(self, steps: list[Step]) -> int:
        """Send the load, print and write the results; return the exit code. Raises ConfigError."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt)
        await self._warm_up()
        if self._settings.finds_max:
            await self._find(MaxSearch(self._settings.request_rate))
        else:
            await self._sweep(steps)
        if not self._done:
            return 130
        chosen = self._chosen()
        self._tell(chosen)
        if self._search is not None:
            return 0 if self._search.met else 1
        return 0 if all(done.summary["completed"] and not done.summary["failed"] for done in self._done) else 1

    async def _warm_up(self) -> None:
        generator = LoadGenerator(self._settings, self._target, self._model, lambda run, sample: None, 0)
        for sample in await generator.warm_up():
            if sample.error:
                raise ConfigError(f"the warm-up failed: {sample.error}")

    async def _sweep(self, steps: list[Step]) -> None:
        if len(steps) > 1:
            print(step_head(), flush=True)
        for step in steps:
            if not self._interrupted:
                await self._step(step, several=len(steps) > 1)

    async def _find(self, search: MaxSearch) -> None:
        self._search = search
        print(step_head(), flush=True)
        while (rate := search.rate) is not None and not self._interrupted:
            done = await self._step(Step(rate), several=True)
            if self._interrupted:
                return
            share = done.summary["slo_attainment"]
            met = not done.run.settled and share >= self._settings.slo_share
            search.took(rate, met=met, alone=done.run.peak <= 1)

    async def _step(self, step: Step, *, several: bool) -> Done:
        settings, index = of_step(self._settings, step), len(self._done)
        if index:
            await asyncio.sleep(BETWEEN_STEPS_S)
        generator = LoadGenerator(settings, self._target, self._model, self._ended(settings), seed_of(settings, index))
        run = generator.run
        self._sending = asyncio.create_task(generator.send())
        with _shown(run, settings, str(step) if several else ""):
            try:
                await self._sending
            except asyncio.CancelledError:
                run.interrupted = not run.settled
        done = Done(step, run, summarize(run, settings))
        self._done.append(done)
        if several:
            print(step_row(done), flush=True)
        return done

    def _ended(self, settings: BenchSettings) -> Callable[[Run, Sample], None]:
        def ended(run: Run, sample: Sample) -> None:
            if self._search is not None and self._sending is not None and missed_already(run, settings):
                run.settled = True
                self._sending.cancel()

        return ended

    def _interrupt(self) -> None:
        self._interrupted = True
        if self._sending is not None:
            self._sending.cancel()

    def _chosen(self) -> Done:
        """The representative step: for a search the highest rate that met, else the highest goodput or throughput."""
        if self._search is not None:
            met = [done for done in self._done if done.step.rate == self._search.met]
            return met[0] if met else self._done[-1]
        figure = "goodput_requests_per_s" if self._settings.has_objectives else "output_tokens_per_s"
        return max(self._done, key=lambda done: float(done.summary[figure]))

    def _tell(self, chosen: Done) -> None:
        """Write files before text: the reader of the text may have closed the pipe."""
        settings, search = self._settings, self._search
        found = (search.met or None) if search is not None else None
        told = document(settings, self._url, self._model, self._done, chosen, found)
        write(settings, told, self._done, chosen)
        if search is not None:
            print(f"\n{verdict(search, settings, self._done[-1].summary)}")
        if len(self._done) > 1:
            print(f"\nat {chosen.step}:")
        print(render(chosen.summary, chosen.run, settings), flush=True)


@contextlib.contextmanager
def _shown(run: Run, settings: BenchSettings, title: str) -> Iterator[None]:
    """Show progress on a terminal while a step runs."""
    progress = asyncio.create_task(_progress(run, settings, title)) if sys.stderr.isatty() else None
    try:
        yield
    finally:
        if progress is not None:
            progress.cancel()
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


async def _progress(run: Run, settings: BenchSettings, title: str) -> None:
    while True:
        seconds = time.monotonic() - (run.started or time.monotonic())
        line = f"{title}  " if title else ""
        print(f"\r{line}{progress_line(run, settings, seconds)}\x1b[K", end="", file=sys.stderr, flush=True)
        await asyncio.sleep(PROGRESS_EVERY_S)


if __name__ == "__main__":
    sys.exit(main())
