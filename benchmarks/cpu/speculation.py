"""Speculation through HTTP: the same requests to two servers, with and without drafts, in turn.

    python -m benchmarks.cpu.speculation --out DIR [--model smollm2]
    python -m benchmarks.cpu.speculation --cells 'chat|facts'          prints a part, writes nothing
    python -m benchmarks.cpu.speculation --device cuda --drafts '{"method": "eagle3", "model": "demo/draft"}'

Each request has a cache salt of its own, so that no answer is drafted from an earlier one. Both servers' texts must be equal.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import operator
import os
import re
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.environment import ROOT, card_of, describe, device_of
from benchmarks.results_format import Result, ResultsPage, notes_of
from benchmarks.up import serving
from services.runtime.servers import free_port

READY_S = 300.0
ROUNDS = 6  # each server is asked first in half of them
MAX_TOKENS = 200
STREAMS = (1, 8)
WHOLE_PROMPTS = 8192  # tokens of a pass: chunks that end elsewhere change a text's last bits, drafted or not
CARD_POOL_MB = 4096  # of each server's KV, for both are on one card
COPIED = (ROOT / "decode/request.py").read_text(encoding="utf-8")[600:2600]
FIELDS = ["customer_name", "shipping_address", "billing_address", "telephone_number", "order_reference", "remarks"]
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 12} for name in FIELDS},
    "required": FIELDS,
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of request: its prompt, further fields, and the least gain that is wanted."""

    name: str
    prompt: str
    target: float
    fields: tuple[tuple[str, Any], ...] = ()


TASKS = (
    Task("copy", f"Repeat this code exactly, word for word:\n```python\n{COPIED}\n```", 2.0),
    Task("edit", f"```python\n{COPIED}\n```\nRename `sequence` to `text` and print the whole code again.", 2.0),
    Task(
        "schema",
        "Write an order of a customer as JSON.",
        1.2,
        (("response_format", {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA}}),),
    ),
    Task("chat", "Tell me a story about a fox, a lighthouse and a storm.", 0.98),
    Task("facts", "Explain how a bicycle works, and why it does not fall over.", 0.98),
)


def main(arguments: Sequence[str]) -> int:
    """Return 1 if a text differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cells", default=".", help="a regular expression that finds the tasks' names")
    parser.add_argument(
        "--drafts", default="suffix", metavar="CONFIG", help="the drafting server's --speculative-config"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args(arguments)
    device = device_of("benchmarks.cpu.speculation", options.device)
    facts = describe("benchmarks.cpu.speculation", arguments, device)
    facts["load"] = ", ".join(f"{load:.1f}" for load in os.getloadavg()) + f" before; {os.cpu_count()} cores"
    page = None
    if options.out is not None:
        stem = f"speculation-{card_of(device) or 'cpu'}"
        page = ResultsPage(options.out, stem, title="Speculation through HTTP", facts=facts, notes=notes_of(stem))
    where = ("--prefill", "0", "--device", options.device, "--max-batch-tokens", str(WHOLE_PROMPTS))
    if device.type == "cuda":
        where += ("--kv-memory-mb", str(CARD_POOL_MB))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        plain, drafting = (
            stack.enter_context(_serving(Path(folder) / name, options.model, flags))
            for name, flags in (("plain", where), ("drafting", (*where, "--speculative-config", options.drafts)))
        )
        differing = 0
        for task in TASKS:
            for streams in STREAMS if re.search(options.cells, task.name) else ():
                differing += _measured(page, task, streams, plain, drafting)
    _add(page, Result(name="differing texts", value=differing, unit="texts", better="lower", target=0))
    return int(differing > 0)


def _add(page: ResultsPage | None, result: Result) -> None:
    print(f"{result.name:32} {result.value:9.3f} {result.unit}", flush=True)
    if page is not None:
        page.add(result)


def _measured(page: ResultsPage | None, task: Task, streams: int, plain: str, drafting: str) -> int:
    """Add a task's gain and rates; return the number of differing texts."""
    gains, rates, differing = list[float](), {plain: list[float](), drafting: list[float]()}, 0
    for number in range(ROUNDS):
        texts = {}
        for url in (plain, drafting) if number % 2 else (drafting, plain):
            texts[url], rate = _asked(url, task, streams)
            rates[url].append(rate)
        differing += sum(map(operator.ne, texts[plain], texts[drafting]))
        gains.append(rates[drafting][-1] / rates[plain][-1])
    name = f"{task.name}, {streams} at once"
    target = task.target if streams == 1 or task.target < 1 else None
    _add(
        page, Result(name=f"{name}: gain", value=statistics.median(gains), unit="times", better="higher", target=target)
    )
    for what, url in (("without", plain), ("with drafts", drafting)):
        _add(
            page, Result(name=f"{name}, {what}", value=statistics.median(rates[url]), unit="tokens/s", better="higher")
        )
    print(name, " ".join(f"{gain:.2f}" for gain in gains), f"; {differing} texts differ", flush=True)
    return differing


def _asked(url: str, task: Task, streams: int) -> tuple[list[str], float]:
    """The texts, and tokens a second of all streams together."""
    bodies = [
        {
            "messages": [{"role": "user", "content": f"({number}) {task.prompt}"}],
            "model": "m",
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "cache_salt": uuid.uuid4().hex,
            **dict(task.fields),
        }
        for number in range(streams)
    ]
    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(streams) as threads:
        answers = list(threads.map(lambda body: _answer(url, body), bodies))
    seconds = time.perf_counter() - began
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    if any("draft_n" in answer.get("timings", {}) for answer in answers):
        _print_drafts(answers, tokens)
    return [answer["choices"][0]["message"]["content"] for answer in answers], tokens / seconds


def _print_drafts(answers: Sequence[dict[str, Any]], tokens: int) -> None:
    timings = [answer["timings"] for answer in answers]
    drafted, accepted = (sum(each.get(name, 0) for each in timings) for name in ("draft_n", "draft_n_accepted"))
    seconds = sum(each["predicted_ms"] for each in timings) / 1e3
    print(f"  {tokens} tokens, {accepted} of {drafted} drafted ones accepted, {1e3 * seconds / tokens:.2f} ms a token")


def _answer(url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600)
    answer.raise_for_status()
    found: dict[str, Any] = json.loads(answer.text)
    return found


@contextmanager
def _serving(folder: Path, model: str, flags: Sequence[str]) -> Iterator[str]:
    folder.mkdir()
    port = free_port()
    command = [sys.executable, "-m", "cli", "up", "--model", model, "--served-model-name", "m", "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    command += ["--data-dir", str(folder / "data"), *flags]
    with serving(command, cwd=ROOT, log=folder / "up.log", ready_s=READY_S, environment=environment):
        yield f"http://127.0.0.1:{port}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
