"""The gateway process: `baton gateway`."""

from __future__ import annotations

import sys

from services.runtime.memory import uncollected

if __name__ == "__main__":
    with uncollected():
        from services.gateway.process import main
    sys.exit(main())
