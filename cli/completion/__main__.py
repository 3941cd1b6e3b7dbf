"""Print a shell's completion: `source <(baton completion bash)`, the same for zsh; `baton completion fish | source`."""

from __future__ import annotations

import sys

from cli.completion.scripts import bash, fish, options, zsh
from services.runtime.loading import fail

SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}


def main() -> int:
    """Entry point; returns the exit code."""
    shell = sys.argv[1] if len(sys.argv) == 2 else ""
    if shell in ("-h", "--help"):
        print("usage: baton completion SHELL\n\n" + (__doc__ or ""))
        return 0
    if shell not in SHELLS:
        return fail(f"baton completion SHELL: one of {', '.join(SHELLS)}")
    print(SHELLS[shell](options()), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
