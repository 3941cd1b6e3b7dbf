"""The decode process: `baton decode`."""

from __future__ import annotations

import sys

from services.runtime.memory import importing

if __name__ == "__main__":
    with importing():
        from services.worker.process import main
    sys.exit(main("decode"))
