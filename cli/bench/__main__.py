"""Load for an OpenAI-compatible server: `baton bench`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from pathlib import Path

import httpx

from cli.bench.client import Sample, Target
from cli.bench.report import render, summarize
from cli.bench.run import LoadGenerator, Run
from cli.bench.settings import BenchSettings
from cli.reach import Gateway
from common.settings import ConfigError, fail, load_settings

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
PROGRESS_EVERY_S = 0.5


def main() -> int:
    """Entry point; 1 when a request failed, 2 when nothing could be sent."""
    try:
        settings = load_settings(BenchSettings, command="bench", arguments=sys.argv[1:])
        server = settings.gateway()
        target = Target.of(server.url, PATHS[settings.endpoint], server.api_key, server.trusted)
        model = settings.served_model_name or first_model(server)
        return asyncio.run(bench(settings, server.url, target, model))
    except KeyboardInterrupt:  # before the load began
        return 130
    except (ConfigError, ValueError, OSError) as error:
        return fail(error)
    except httpx.HTTPError as error:
        return fail(server.silent(error))


def first_model(server: Gateway) -> str:
    """The first model that the server lists. Raises httpx.HTTPError and ConfigError."""
    with server.client(timeout_s=10) as client:
        answer = client.get("/v1/models")
    if answer.status_code != 200:
        raise ConfigError(f"{server.url}/v1/models: HTTP {answer.status_code}; --api-key or --served-model-name?")
    models = answer.json()["data"]
    if not models:
        raise ConfigError(f"{server.url} lists no model: give --served-model-name")
    return str(models[0]["id"])


async def bench(settings: BenchSettings, url: str, target: Target, model: str) -> int:
    """Send the load, print the report; Ctrl-C ends the load and prints what there is."""

    def ended(run: Run, sample: Sample) -> None:
        if settings.print_each:
            what = (
                sample.error
                or f"{sample.tokens} tokens, TTFT {sample.ttft * 1e3:.1f} ms, in all {sample.e2e * 1e3:.1f} ms"
            )
            print(f"{len(run.samples)}/{settings.num_prompts} {what}", flush=True)

    generator = LoadGenerator(settings, target, model, ended)
    for sample in await generator.warm_up():
        if sample.error:
            raise ConfigError(f"the warm-up failed: {sample.error}")
    sending = asyncio.create_task(generator.send())
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, sending.cancel)
    progress = asyncio.create_task(_progress(generator, settings)) if sys.stderr.isatty() else None
    try:
        await sending
    except asyncio.CancelledError:
        generator.run.interrupted = True
    finally:
        if progress is not None:
            progress.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await progress
    summary = summarize(generator.run, settings)
    print(render(summary, generator.run))
    if settings.json_file:
        options = settings.model_dump(exclude={"url", "api_key", "data_dir", "json_file"})
        result = {"server": url, "model": model, "options": options, "results": summary}
        Path(settings.json_file).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if summary["completed"] and not summary["failed"] else 1


async def _progress(generator: LoadGenerator, settings: BenchSettings) -> None:
    try:
        while True:
            run = generator.run
            failed = sum(1 for sample in run.samples if sample.error)
            seconds = time.monotonic() - (run.started or time.monotonic())
            ended = f"{len(run.samples)}/{settings.num_prompts} ended"
            line = f"{seconds:6.1f} s  {ended}, {run.in_flight} in flight, {failed} failed"
            print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
            await asyncio.sleep(PROGRESS_EVERY_S)
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
