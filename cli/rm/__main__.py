"""Remove models from this machine: `baton rm NAME …`."""

from __future__ import annotations

import argparse
import sys

from common.settings import ConfigError
from services.runtime.checks.model import gigabytes
from services.runtime.hub import NAMED, is_kept, kept
from services.runtime.loading import fail
from services.runtime.models.kept import Kept, named_one, removed, removed_of_package, served_by
from services.runtime.models.serving import servers_of


def main() -> int:
    """Entry point; 1 if nothing was removed because nobody said yes."""
    parser = argparse.ArgumentParser(prog="baton rm", description="Remove models from the hub's cache.")
    parser.add_argument("names", nargs="+", metavar="NAME", help="as `baton list` shows it, or a path in the cache")
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
        freed += sum(removed_of_package(name, also_served=given.yes) for name in packaged)
    except (ConfigError, OSError) as error:
        return fail(error)
    print(f"removed {', '.join([*(one.name for one in models), *packaged])}: {gigabytes(freed)} are free again")
    return 0


def _is_meant(models: list[Kept], packaged: list[str]) -> bool:
    """Ask on a terminal. Raises ConfigError for what is served."""
    meant = {one.name: (one.model, one.num_bytes - one.shared_bytes) for one in models}
    meant |= {name: (file, NAMED[name].num_bytes) for name in packaged if (file := kept(name)) is not None}
    for name, (model, _) in meant.items():
        if who := servers_of(model):
            raise ConfigError(f"{served_by(name, who)}, or say --yes")
    if not sys.stdin.isatty():
        return True
    for name, (_, num_bytes) in meant.items():
        print(f"{name}: {gigabytes(num_bytes)}", file=sys.stderr)
    return input(f"remove {' and '.join(meant)}? [y/N] ").strip().lower() in ("y", "yes")


if __name__ == "__main__":
    sys.exit(main())
