"""Starts an engine on a GPU and prints as JSON what was compiled meanwhile, see `tests.compilations`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from tests.compilations import watch


def main(model: Path) -> None:
    compiled = watch()
    Engine(
        EngineConfig(
            model=model, device="cuda", dtype="bfloat16", max_batch_tokens=4096, cache=CacheConfig(num_blocks=600)
        )
    )
    print(json.dumps(compiled), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
