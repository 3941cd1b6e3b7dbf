"""The process of a worker that pools: `baton pool`."""

from __future__ import annotations

import sys

from services.runtime.memory import importing

if __name__ == "__main__":
    with importing():
        from services.pool.process import main
    sys.exit(main())
