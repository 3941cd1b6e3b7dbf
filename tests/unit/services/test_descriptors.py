"""The gateway's limit of open files is raised to what its connections need, as far as it may be."""

from __future__ import annotations

import subprocess
import sys

import pytest

from services.gateway.descriptors import OTHER_DESCRIPTORS

SCRIPT = """
import logging, resource
from services.gateway.descriptors import make_room
logging.basicConfig(format="%(message)s %(allowed)s")
resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))
make_room(100)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("hard", "raised_to", "warned"),
    [(OTHER_DESCRIPTORS + 200, OTHER_DESCRIPTORS + 100, ""), (1000, 1000, "gateway.few_descriptors 1000\n")],
)
def test_the_limit_is_raised_as_far_as_it_may_be(hard: int, raised_to: int, warned: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(hard=hard)], capture_output=True, text=True, timeout=60, check=True
    )
    assert (int(done.stdout), done.stderr) == (raised_to, warned)
