"""Another rank: a process that executes packed passes on a pool of its own and answers with their logits.

    python -m tests.unit.engine.rank MODEL POOL NUM_BLOCKS

`POOL`: a file with the pool's bytes to begin with. Frames on stdin: a packed pass, then what the pass before it sampled.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import torch

from engine.batch.layout import Packed
from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine

ROOT = Path(__file__).resolve().parents[3]


class Rank:
    """The process, as the first rank sees it."""

    def __init__(self, model: Path, pool: Path, num_blocks: int) -> None:
        command = [sys.executable, "-m", "tests.unit.engine.rank", str(model), str(pool), str(num_blocks)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def execute(self, packed: bytes, newest: list[int]) -> list[list[float]]:
        """The logits of each sampled row."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        _send(self._process.stdin, packed)
        _send(self._process.stdin, msgspec.msgpack.encode(newest))
        answer = _receive(self._process.stdout)
        assert answer is not None, "the rank ended"
        return msgspec.msgpack.decode(answer, type=list[list[float]])

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(timeout=120) == 0


def _send(stream: BinaryIO, data: bytes) -> None:
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


def _receive(stream: BinaryIO) -> bytes | None:
    head = stream.read(4)
    return stream.read(struct.unpack("<I", head)[0]) if len(head) == 4 else None


def _serve(model: Path, pool: Path, num_blocks: int) -> None:
    engine = Engine(EngineConfig(model=model, num_threads=1, dtype="float32", cache=CacheConfig(num_blocks=num_blocks)))
    kv = np.fromfile(pool, dtype=np.float32)
    engine.kv.copy_(torch.from_numpy(kv).view(engine.kv.shape))
    answers = sys.stdout.buffer
    while (data := _receive(sys.stdin.buffer)) is not None:
        newest = msgspec.msgpack.decode(_receive(sys.stdin.buffer) or b"", type=list[int])
        engine._runner.keep_newest(torch.tensor(newest, dtype=torch.int64))
        logits = engine._runner.execute(Packed.decode(data))
        _send(answers, msgspec.msgpack.encode([] if logits is None else logits.float().tolist()))


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
