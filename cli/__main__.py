"""The `baton COMMAND …` entry point. An interrupt from here on exits quietly, so everything else is imported later."""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    try:
        from cli.entry import run

        return run(arguments)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
