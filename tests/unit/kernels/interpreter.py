"""Checks in Triton's interpreter, one after the other in one process: its start takes longer than most checks.

    echo '["triton_checks", "norm"]' | TRITON_INTERPRET=1 python -m tests.unit.kernels.interpreter

In: lines that name a module of this folder and what its `interpret` checks. Out: a line for each, "" or what was wrong.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path
from unittest import mock

import torch

from engine.kernels.device import use_triton

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 280  # less than what ends the whole run


class Interpreter:
    """The process that checks; another one follows where a check ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def check(self, module: str, argument: str) -> None:
        """Raise AssertionError with what was wrong."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([module, argument]) + "\n")
        process.stdin.flush()
        there, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
        answer = process.stdout.readline() if there else ""
        if not answer:
            self.end()
        assert answer, f"{module} {argument}: " + ("the process ended" if there else f"no answer within {TIMEOUT_S} s")
        wrong = json.loads(answer)
        assert not wrong, wrong

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.unit.kernels.interpreter"],
            cwd=ROOT,
            env={**os.environ, "TRITON_INTERPRET": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def end(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a check prints is no answer
    torch.set_num_threads(1)
    assert os.environ.get("TRITON_INTERPRET") == "1"
    assert use_triton(torch.zeros(1)), "this would check the twins"
    from triton.runtime.interpreter import GridExecutor

    from tests.unit.kernels.quicker import make_quicker

    make_quicker()
    for line in sys.stdin:
        module, argument = json.loads(line)
        torch.manual_seed(0)
        wrong = ""
        try:
            with mock.patch.object(
                GridExecutor, "__call__", autospec=True, side_effect=GridExecutor.__call__
            ) as launch:
                import_module(f"tests.unit.kernels.{module}").interpret(argument)
            assert launch.called, "no kernel ran: this checked the twins"
        except BaseException:
            wrong = traceback.format_exc()
        answers.write(json.dumps(wrong) + "\n")


if __name__ == "__main__":
    _serve()
