"""A check that the engine supports every field of a model, in a child process that imports torch. Prints findings as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from engine.config import EngineConfig
from engine.families import read_model_spec
from engine.foreign import is_foreign
from services.runtime.checks.finding import Finding


def check(model: Path) -> Iterator[Finding]:
    """Read the model as a worker does, without its weights."""
    try:
        if is_foreign(EngineConfig(model=model)):
            return  # only transformers could tell, and it is slow
        spec = read_model_spec(model)
    except (ValueError, OSError) as error:
        yield Finding("model", "fail", " ".join(str(error).split()))
        return
    text = f"all fields are known: {len(spec.layers)} layers, {spec.max_position_embeddings} positions"
    yield Finding("model", "ok", text)


if __name__ == "__main__":
    json.dump([asdict(finding) for finding in check(Path(sys.argv[1]))], sys.stdout)
