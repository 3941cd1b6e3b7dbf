"""The gateway process: `baton gateway`."""

from __future__ import annotations

import sys

from services.runtime.memory import importing

if __name__ == "__main__":
    with importing():
        from services.gateway.process import main
    sys.exit(main())
