"""`python -m tests.simulation SEED`: one seed again, with what happened. `python -m tests.simulation FIRST LAST`: many.

A form's name before them, as `cramped`, has worlds of that form.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter

from tests.simulation.forms import FORMS, FREE
from tests.simulation.world import Violation, no_garbage_collection, play


def main(arguments: list[str]) -> int:
    form = FREE if arguments[0].isdecimal() else FORMS[arguments.pop(0)]
    if len(arguments) == 1:
        try:
            world = play(int(arguments[0]), form=form, log=print)
        except Violation as error:
            print(error)
            return 1
        print(dict(sorted(world.faults.items())))
        return 0
    first, last = map(int, arguments)
    faults: Counter[str] = Counter()
    failed, started = 0, time.perf_counter()
    callbacks, virtual_s = 0, 0.0
    with no_garbage_collection():
        for seed in range(first, last):
            if seed % 50 == 0:
                gc.collect()
            try:
                world = play(seed, form=form)
            except Violation as error:
                failed += 1
                print(error)
                continue
            faults += world.faults
            callbacks, virtual_s = callbacks + world.loop.callbacks, virtual_s + world.loop.now
    seconds = time.perf_counter() - started
    print(dict(sorted(faults.items())))
    print(f"{last - first} seeds, {failed} failed, {seconds:.1f} s, {virtual_s:.0f} virtual s, {callbacks} callbacks")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
