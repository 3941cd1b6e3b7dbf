"""One model's answers for a parent process: what `LLM` starts. Takes a worker's options."""

from __future__ import annotations

import asyncio
import sys

from common.errors import ServingError
from common.settings import ConfigError
from services.runtime.memory import importing


def main() -> int:
    """Entry point; returns the exit code."""
    with importing():
        from services.offline.offline import offline_settings
        from services.offline.pipe import own_output, serve_lines, tell
    out = own_output()
    try:
        asyncio.run(serve_lines(offline_settings(sys.argv[1:], _say), out))
    except (ConfigError, ServingError, OSError, ValueError, MemoryError) as error:
        tell(out, {"error": str(error)})
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
