"""Requests in a file, answers in another, one engine, no servers: `baton run-batch -i IN -o OUT --model MODEL`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.offline.batch import Answers, Counts
    from services.worker.settings import WorkerServiceSettings


def main() -> int:
    """Entry point; 1 if a request failed, 2 if nothing could be done."""
    parser = argparse.ArgumentParser(
        prog="baton run-batch",
        description="Answer a JSONL file of requests in OpenAI's form. What OUT has already is not asked again.",
        epilog="Further options are those of a worker: baton worker --help.",
    )
    parser.add_argument("-i", "--input-file", type=Path, required=True, metavar="IN")
    parser.add_argument("-o", "--output-file", type=Path, required=True, metavar="OUT")
    given, rest = parser.parse_known_args()
    # Imported here, so that help doesn't wait for torch.
    from common.errors import ServingError
    from common.settings import ConfigError
    from services.offline.batch import Answers, Counts, checked
    from services.offline.offline import offline_settings
    from services.runtime.loading import fail
    from services.runtime.log import start_logging

    try:
        counts = Counts(checked(given.input_file))
        settings = offline_settings(rest, _say)
        start_logging(service="run-batch", level="warning", form=settings.log_format)
        answers = Answers(given.output_file)
        try:
            return asyncio.run(_run(settings, given.input_file, answers, counts))
        finally:
            answers.close()
    except (ConfigError, ServingError, OSError, ValueError, MemoryError) as error:
        return fail(error)
    except KeyboardInterrupt:
        _say("stopped: the same command goes on from here")
        return 130


async def _run(settings: WorkerServiceSettings, source: Path, answers: Answers, counts: Counts) -> int:
    from services.offline.batch import progress, run
    from services.offline.offline import opened

    counts.answered = before = len(answers.known)
    async with opened(settings) as offline:
        began = time.monotonic()
        await run(offline, source, answers, counts, progress(counts))
        seconds = time.monotonic() - began
    again = f", {before} of them before" if before else ""
    _say(
        f"{counts.answered} of {counts.total} requests answered{again}, {counts.failed} with an error, in {seconds:.1f} s"
    )
    return int(counts.failed > 0)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
