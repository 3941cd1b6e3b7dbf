"""The worker process: `baton worker`."""

from __future__ import annotations

import sys

from services.runtime.worker_process import main

if __name__ == "__main__":
    sys.exit(main("worker", ("decode", "prefill")))
