"""Facts about a model: `baton show NAME`, a folder's or a file's path as well."""

from __future__ import annotations

import argparse
import asyncio
import sys
from importlib.util import find_spec
from pathlib import Path

from cli.doctor.child import asked
from common.settings import ConfigError
from services.runtime.checks.finding import Finding
from services.runtime.checks.gpus import visible_gpus
from services.runtime.checks.memory import available_bytes
from services.runtime.checks.model import check_model, gigabytes, longest
from services.runtime.hub import parsed
from services.runtime.loading import fail
from services.runtime.models.kept import Kept, named_one
from services.runtime.settings import from_root


def main() -> int:
    """Entry point; 1 if it could not be served, 2 if it is not here."""
    parser = argparse.ArgumentParser(prog="baton show", description="Describe a model: its files and what they hold.")
    parser.add_argument("name", metavar="NAME", help="org/name[@revision][:file-or-quant], a folder or a GGUF file")
    given = parser.parse_args()
    try:
        model = from_root(Path(given.name))
        kept = None
        if not Path(given.name).exists() and parsed(given.name):
            kept = _one(given.name)
            model = kept.model
        if not model.exists():
            raise ConfigError(f"{given.name}: no such folder or file, and no name of a model")
        return _show(given.name, model, kept)
    except (ConfigError, OSError, ValueError) as error:
        return fail(error)


def _one(name: str) -> Kept:
    found = named_one(name)
    if len(found) > 1:
        raise ConfigError(f"{name}: which one? {', '.join(one.name for one in found)}")
    return found[0]


def _show(name: str, model: Path, kept: Kept | None) -> int:
    print(f"{'name':<10}{kept.name if kept else name}")
    print(f"{'path':<10}{model}")
    if kept is not None:
        state = "served by a process of this machine" if kept.is_served else "not served"
        print(f"{'commit':<10}{kept.commit}\n{'state':<10}{state if kept.is_whole else 'not whole'}")
        print(f"{'on disk':<10}{gigabytes(kept.num_bytes)}, of which {gigabytes(kept.shared_bytes)} are others', too")
        for file in kept.files:
            size = gigabytes(file.stat().st_size) if file.exists() else "missing"
            print(f"{'file':<10}{file.relative_to(kept.snapshot)}  {size}")
    found = list(check_model(model))
    for finding in found:
        print(f"{finding.check:<10}{finding.said}")
    if any(finding.level == "fail" for finding in found):
        return 1
    if most := longest(model):
        print(f"{'context':<10}{most} positions")
    for finding in fit_here(model):
        print(f"{finding.check:<10}{finding.said}")
    return 0


def fit_here(model: Path) -> list[Finding]:
    """The model's needs beside this machine's smallest GPU, or its memory; none where torch isn't installed."""
    if find_spec("torch") is None:
        return []
    gpus = visible_gpus()
    device = "cuda:0" if gpus else "cpu"
    total = min(gpu.total_bytes for gpu in gpus) if gpus else available_bytes() or 0
    found = asyncio.run(asked("spec", str(model.absolute()), device, "1", str(total)))
    return [finding for finding in found if finding.check == "fit"]


if __name__ == "__main__":
    sys.exit(main())
