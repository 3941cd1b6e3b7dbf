"""The time until a process's engine is ready, with an empty Triton cache or a filled one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environment import ROOT

TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartUp:
    """Seconds since the process was started."""

    imported: float
    ready: float  # the engine is built: weights loaded, pool allocated, graphs captured
    first_token: float  # computing it may compile what building did not


def start_process(config: dict[str, object], *, prompt: int, triton_cache: Path) -> StartUp:
    """Build an engine of `config` (fields of `EngineConfig`) in a new process and let it answer one prompt.

    Raises RuntimeError with the end of its output when it fails.
    """
    started = time.monotonic()  # one clock for all processes of a machine
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.engine.startup", json.dumps(config), str(prompt)],
        cwd=ROOT,
        env={**os.environ, "TRITON_CACHE_DIR": str(triton_cache)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if child.returncode != 0:
        raise RuntimeError(f"the starting process ended with {child.returncode}: {child.stderr[-2000:]}")
    instants = json.loads(child.stdout.splitlines()[-1])
    return StartUp(**{name: instant - started for name, instant in instants.items()})


def _main(config: dict[str, object], prompt: int) -> None:
    from common.messages import SamplingParams
    from engine.config import CacheConfig, EngineConfig
    from engine.engine import Engine
    from engine.sequence import Sequence
    from engine.step.warm import tables_from

    instants = {"imported": time.monotonic()}
    engine = Engine(
        EngineConfig(**{**config, "model": Path(str(config["model"])), "cache": CacheConfig(**config["cache"])})
    )  # type: ignore[arg-type]
    instants["ready"] = time.monotonic()
    num_blocks = -(-prompt // engine.layout.block_size)
    sequence = Sequence(
        request_id="first",
        attempt=1,
        token_ids=[token % engine.vocab_size for token in range(prompt)],
        num_prompt_tokens=prompt,
        sampling=SamplingParams(temperature=0.0, max_tokens=1),
        hash_root=b"",
        tables=tables_from(engine.layout, 0, num_blocks),
    )
    engine.launch([sequence.schedule(prompt)]).wait()
    instants["first_token"] = time.monotonic()
    print(json.dumps(instants), flush=True)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]), int(sys.argv[2]))
