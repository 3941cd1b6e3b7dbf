"""Start an engine and print as JSON what was compiled meanwhile: [[kernel, thread, whether it was in the cache], ...].

TRITON_CACHE_DIR=... python -m tests.gpu.starting MODEL
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

from triton import knobs

from engine.config import EngineConfig
from engine.engine import Engine


def main(model: Path) -> None:
    compiled: list[tuple[str, str, bool]] = []

    def listen(*, src: Any, cache_hit: bool, **_: object) -> None:
        compiled.append((src.name, threading.current_thread().name.split("_")[0], cache_hit))

    knobs.compilation.listener = listen
    Engine(EngineConfig(model=model, device="cuda", dtype="bfloat16", num_blocks=600, max_batch_tokens=4096))
    print(json.dumps(compiled), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
