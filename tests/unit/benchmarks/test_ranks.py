"""The parts of `benchmarks.ranks`: each ends in time, and the exit code is that of the worst."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.collectives.ranks import run_ranks
from benchmarks.ranks import __main__ as ranks

WELL, FAILS, KILLED, HANGS = (
    "",
    "raise SystemExit(3)",
    "import os; os.kill(os.getpid(), 9)",
    "import time; time.sleep(60)",
)


@pytest.mark.parametrize(("parts", "code"), [((WELL,), 0), ((FAILS, WELL), 3), ((KILLED, FAILS), 137), ((HANGS,), 124)])
def test_the_exit_code_is_that_of_the_worst_part(
    parts: tuple[str, ...], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that a signal ended, as for lack of memory, is none that went well."""
    asked = [("part", ["-S", "-c", part], 1.0 if part == HANGS else 30.0) for part in parts]
    monkeypatch.setattr(ranks, "commands", lambda options: iter(asked))
    assert ranks.main(["--devices", "cpu,cpu", "--out", str(tmp_path)]) == code


DIES = """
import os, sys
rank = int(sys.argv[1])
if rank == 1:
    os.close(0)
print('{"exchange": "00"}', flush=True)
if rank == 1:
    os._exit(1)
sys.stdin.readline()
print('{"exchange": "01"}', flush=True)
sys.stdin.readline()
print('{"result": 7}', flush=True)
"""


def test_a_rank_that_dies_between_two_words_has_no_result_and_the_others_have_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rank_that_dies.py").write_text(DIES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_ranks("rank_that_dies", [0, 1], timeout_s=60) == [7, None]
