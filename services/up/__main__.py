"""All of Baton on one machine: `baton up`."""

from __future__ import annotations

import sys

from services.nursery.beginning import begin_ahead


def main() -> int:
    """Entry point; returns the exit code."""
    begun = None
    try:
        begun = begin_ahead(sys.argv[1:])
        # Imported meanwhile: options and checks take as long as a third of the nursery's imports.
        from services.up.command import up

        return up(sys.argv[1:], begun)
    except KeyboardInterrupt:  # the second Ctrl-C: children die with this process
        return 130
    finally:
        if begun is not None:
            begun.end()


if __name__ == "__main__":
    sys.exit(main())
