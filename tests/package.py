"""`make package`: `baton up` of an installed wheel, in an empty folder, asked one question and stopped.

python -m tests.package build FOLDER    (its wheel, for `pip install`)
python -m tests.package try BATON       (the installed program)
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

from tests.installed import IN_THE_ANSWER, answer, build_wheel, serving, without_ours


def main() -> int:
    """Entry point; returns the exit code."""
    what, where = sys.argv[1:]
    if what == "build":
        print(build_wheel(Path(where)))
        return 0
    began = time.monotonic()
    told = asyncio.run(_tried(Path(where).absolute()))
    print(f"package: {told!r}, started, asked and stopped in {time.monotonic() - began:.1f} s")
    return int(IN_THE_ANSWER not in told)


async def _tried(baton: Path) -> str:
    with tempfile.TemporaryDirectory(prefix="baton-package-") as empty:
        async with serving([str(baton)], Path(empty), without_ours()) as url:
            return await answer(url)


if __name__ == "__main__":
    sys.exit(main())
