"""Fetch models by name: `baton pull NAME …`."""

from __future__ import annotations

import argparse
import sys

from cli.show.__main__ import fit_here
from common.settings import ConfigError
from services.runtime.checks.model import check_model, described, gigabytes
from services.runtime.checks.weights import weights_of
from services.runtime.hub import FORMS, NAMED
from services.runtime.loading import fail
from services.runtime.models.named import by_name


def main() -> int:
    """Entry point; 1 if one could not be served, 2 if one could not be fetched."""
    parser = argparse.ArgumentParser(prog="baton pull", description="Fetch models, or what is newer of them.")
    names = f"org/name[@revision][:file-or-quant] at a hub, {', '.join(FORMS.values())}, or {', '.join(NAMED)}"
    parser.add_argument("names", nargs="+", metavar="NAME", help=names)
    given = parser.parse_args()
    all_served = True
    try:
        for name in given.names:
            model = by_name(name, _say, newest=True)
            weights = weights_of(model)
            print(f"{name}: {described(weights) if weights.num_files else gigabytes(0)}; {model}")
            found = [finding for finding in check_model(model) if finding.level != "ok"]
            is_refused = any(finding.level == "fail" for finding in found)
            for finding in [*found, *([] if is_refused else fit_here(model))]:
                print(f"{name}: {finding.said}")
            all_served = all_served and not is_refused
    except (ConfigError, OSError, ValueError) as error:
        return fail(error)
    except KeyboardInterrupt:
        print("stopped: the same command goes on from here", file=sys.stderr)
        return 130
    return 0 if all_served else 1


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
