"""A stand-in of the hub, to which its own client is pointed, a cache of its own, and a judge of models without a start."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from huggingface_hub import constants

from services.runtime.models import fetching
from services.worker import refusals
from services.worker.judging import said
from tests.hub import Hub, hub_served


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_served() as hub:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "home" / "token"))
        monkeypatch.setattr(fetching, "FIRST_PAUSE_S", 0.0)
        monkeypatch.chdir(tmp_path)
        yield hub


@pytest.fixture
def judged_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are judged in this process, not in a child, which takes seconds to import torch.

    Without it, `test_up_refuses_a_model_that_a_role_s_ranks_can_t_share_before_anything_starts` asks a child.
    """

    def run(command: Sequence[str], *, input: bytes, **_: Any) -> subprocess.CompletedProcess[bytes]:
        assert command[1:] == ["-m", "services.worker.judging"]
        asked = msgspec.json.decode(input, type=list[dict[str, str]])
        return subprocess.CompletedProcess(command, 0, stdout=msgspec.json.encode([said(each) for each in asked]))

    of_this_process = SimpleNamespace(**vars(subprocess) | {"run": run})
    monkeypatch.setattr(refusals, "subprocess", of_this_process)
