"""A further rank of a worker: the worker starts it."""

from __future__ import annotations

from services.runtime.memory import importing

if __name__ == "__main__":
    with importing():
        from services.rank.process import main
    main()
