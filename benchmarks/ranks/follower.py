"""A further rank of an engine that a test or a benchmark leads: `python -m benchmarks.ranks.follower STAGES LOAD DEVICES …`.

It repeats passes until its leader ends. A worker's further ranks (`services.rank`) also move KV.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.weights.drawn import draw_weights
from engine.engine import Engine
from engine.lockstep import decode_config
from engine.weights.loader import load_weights
from services.rank.devices import ranks_on
from services.rank.gpu import see_one_gpu
from services.rank.process import Ends

LOADS = {"stored": load_weights, "drawn": draw_weights}


def main(stages: str, load: str, devices: str, *ends_of: str) -> None:
    """Follow the leader. `stages`: their number, 1 for ranks alone; `devices`: each one's card by number, "" on a CPU."""
    ends = Ends(*map(int, ends_of))
    if devices:
        see_one_gpu(int(devices.split(",")[ends.rank]), count=torch.cuda.device_count())
    config = ends.link.receive()
    if config is None:
        return
    settings = decode_config(config)
    try:
        ranks = ranks_on(ends.group, settings.device, stages=int(stages))
        engine = Engine(settings, load=LOADS[load], ranks=ranks)
    except (OSError, ValueError, MemoryError, RuntimeError) as error:
        ends.link.send((str(error) or type(error).__name__).encode())
        raise
    ends.link.send(b"")
    while (frame := ends.link.receive()) is not None:
        engine.follow(frame)


if __name__ == "__main__":
    main(*sys.argv[1:])
