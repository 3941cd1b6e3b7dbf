"""The next turn of a session where another worker computes it: first tokens with pulls from the one that generated, and without.

    python -m benchmarks.sessions.pulls --out DIR                                  demo model on a CPU, in two minutes

Each arm is a whole Baton with a prefill and a decode worker (`baton up`), which hands every prompt over. Both arms play the
same sessions with long answers; `computed` has `--transport auto,no-pull`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import httpx

from benchmarks.environment import ROOT
from benchmarks.sessions.agents import Asked, play
from benchmarks.sessions.trace import sessions
from benchmarks.up import serving

START_S = 240.0
ARMS = {"computed": "auto,no-pull", "pulled": "auto"}
COUNTED = "baton_worker_pulled_tokens_total"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 when a request failed, else 0."""
    options = _parse(arguments)
    vocab_size = int(json.loads((options.model / "config.json").read_text())["vocab_size"])
    turns = {"turns": options.turns, "context": options.context, "pause_s": options.pause_s}
    played = [
        [replace(turn, answer_tokens=options.answer) for turn in session]
        for session in sessions(options.agents, vocab_size=vocab_size, **turns)
    ]
    failed = 0
    for arm, transport in ARMS.items():
        with tempfile.TemporaryDirectory(prefix="baton-pulls-") as data:
            command = [sys.executable, "-m", "services.up", "--model", str(options.model), "--port", str(options.port)]
            command += ["--device", options.device, "--prefill", "1", "--decode", "1", "--data-dir", data]
            command += ["--transport", transport, "--local-prefill-tokens", "0", *options.up.split()]
            with serving(command, cwd=ROOT, log=options.out / f"{arm}_up.log", ready_s=START_S):
                url = f"http://127.0.0.1:{options.port}"
                asked = asyncio.run(play(url, options.model.resolve().name, played))
                metrics = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
        tokens = sum(float(line.rpartition(" ")[2]) for line in metrics if line.startswith(COUNTED + "{"))
        print(_told(arm, asked, tokens), flush=True)
        failed += sum(bool(each.error) for each in asked)
    return 1 if failed else 0


def _told(arm: str, asked: Sequence[Asked], pulled: float) -> str:
    later = [each for each in asked if each.turn and not each.error]
    ttft = sorted(1000 * each.ttft_s for each in later)
    found = 100 * sum(min(each.cached, each.reusable) for each in later) / max(1, sum(each.reusable for each in later))
    return (
        f"{arm}: first token p50 {statistics.median(ttft):.1f} ms, p90 {ttft[int(0.9 * (len(ttft) - 1))]:.1f} ms; "
        f"{found:.1f} % of reusable tokens found; {pulled:.0f} tokens pulled"
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sessions.pulls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the logs")
    parser.add_argument("--model", type=Path, default=ROOT / "demo", help="folder of a model; default: the demo model")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N,cuda:M")
    parser.add_argument("--agents", type=int, default=2)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--context", type=int, default=200, help="tokens of the mean prompt, but for the answers")
    parser.add_argument("--answer", type=int, default=250, help="tokens of an answer")
    parser.add_argument("--pause-s", type=float, default=0.5, help="mean time between two turns")
    parser.add_argument("--port", type=int, default=8391)
    parser.add_argument("--up", default="", help="further options of `baton up`")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
