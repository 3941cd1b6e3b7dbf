"""A further rank of a worker: the worker starts it."""

from __future__ import annotations

import signal

from services.runtime.memory import importing

if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):  # systemd tells every process, and the leader drains with its ranks
        signal.signal(number, signal.SIG_IGN)  # before the imports, which take seconds
    with importing():
        from services.rank.process import main
    main()
