"""The unit of systemd: read by systemd itself where it is installed, with this checkout's command."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from services.runtime.loading import load_settings
from services.up.settings import UpSettings
from services.up.stack import STOP_MARGIN_S

ROOT = Path(__file__).resolve().parents[3]
UNIT = ROOT / "deploy/systemd/baton.service"


def unit() -> configparser.ConfigParser:
    read = configparser.ConfigParser(strict=True)
    read.optionxform = str  # type: ignore[assignment, method-assign]
    read.read(UNIT)
    return read


def test_its_options_are_ours_and_it_waits_for_the_drain() -> None:
    service = unit()["Service"]
    _, command, *options = service["ExecStart"].split()
    settings = load_settings(UpSettings, command=command, arguments=options, environment={})
    assert str(settings.data_dir) == service["WorkingDirectory"] == f"/var/lib/{service['StateDirectory']}"
    # Gateway and workers stop one after the other.
    assert float(service["TimeoutStopSec"]) > settings.drain_s + 2 * STOP_MARGIN_S
    assert service["RestartPreventExitStatus"] == "2"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_systemd_reads_it(tmp_path: Path) -> None:
    text = UNIT.read_text().replace("/usr/local/bin/baton", str(ROOT / "baton"))
    copy = tmp_path / UNIT.name
    copy.write_text(re.sub(r"^User=.*\n", "", text, flags=re.MULTILINE))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    about_ours = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert about_ours == []
