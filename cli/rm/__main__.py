"""Remove models from this machine: `baton rm NAME …`."""

from __future__ import annotations

import argparse
import sys

from common.settings import ConfigError
from services.runtime.checks.model import gigabytes
from services.runtime.hub import NAMED, is_kept, kept
from services.runtime.loading import fail
from services.runtime.models.kept import Kept, named_one, removed


def main() -> int:
    """Entry point; 1 if nothing was removed because nobody said yes."""
    parser = argparse.ArgumentParser(prog="baton rm", description="Remove models from the hub's cache.")
    parser.add_argument("names", nargs="+", metavar="NAME", help="org/name[@revision][:file-or-quant], or smollm2")
    parser.add_argument("--yes", action="store_true", help="don't ask, and remove also what a process serves")
    given = parser.parse_args()
    try:
        packaged = [name for name in given.names if name in NAMED]
        models = [one for name in given.names if name not in NAMED for one in named_one(name)]
        if missing := [name for name in packaged if not is_kept(name)]:
            raise ConfigError(f"{missing[0]}: not here")
        if not given.yes and not _is_meant(models, packaged):
            print("nothing was removed")
            return 1
        freed = removed(models, also_served=given.yes)
        for name in packaged:
            file = kept(name)
            if file is not None:
                freed += file.stat().st_size
                file.unlink()
    except (ConfigError, OSError) as error:
        return fail(error)
    print(f"removed {', '.join([*(one.name for one in models), *packaged])}: {gigabytes(freed)} are free again")
    return 0


def _is_meant(models: list[Kept], packaged: list[str]) -> bool:
    """Ask on a terminal. Raises ConfigError where nobody could answer."""
    for one in models:
        served = ", which a process of this machine serves" if one.is_served else ""
        print(f"{one.name}: {gigabytes(one.num_bytes - one.shared_bytes)}{served}", file=sys.stderr)
    if not sys.stdin.isatty():
        if any(one.is_served for one in models):
            raise ConfigError("a process of this machine serves it: stop that first, or say --yes")
        return True
    what = " and ".join([*(one.name for one in models), *packaged])
    return input(f"remove {what}? [y/N] ").strip().lower() in ("y", "yes")


if __name__ == "__main__":
    sys.exit(main())
