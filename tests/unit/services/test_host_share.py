"""`--kv-host-mb auto`: a share of free memory, for all workers of a machine together."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.runtime.checks import memory
from services.up import checks
from services.up.settings import UpSettings
from services.worker.host_share import HOST_SHARE, HostMB


def test_a_number_is_what_was_asked_for() -> None:
    assert [HostMB.parse(asked).resolved(num_workers=3, free_bytes=1 << 30) for asked in ("0", "7", "9:shared")] == [
        0,
        7,
        9,
    ]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_auto_is_a_share_for_all_together(num_workers: int) -> None:
    free_mb = 6000
    each = HostMB.parse("auto").resolved(num_workers=num_workers, free_bytes=free_mb << 20)
    assert each == HOST_SHARE * free_mb / num_workers


def test_up_shares_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 4000 << 20)
    settings = UpSettings.model_validate({"kv_host_mb": "auto", "prefill": 3, "decode": 1})
    assert settings.shared_out().kv_host_mb == f"{HOST_SHARE * 1000:.0f}"


def test_workers_that_pool_have_no_part_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 4000 << 20)
    vectors = tmp_path / "vectors"
    vectors.mkdir()
    (vectors / "config.json").write_text('{"architectures": ["BertModel"]}')
    asked = {"model": f"a=demo,b={vectors}", "prefill": 1, "decode": 1}
    settings = UpSettings.model_validate(asked | {"kv_host_mb": "auto"}).shared_out()
    assert settings.workers == 3
    assert settings.kv_host_mb == f"{HOST_SHARE * 2000:.0f}"
    most = UpSettings.model_validate(asked | {"kv_host_mb": "2000"}).shared_out()
    assert [finding.text for finding in checks._host_memory(most, 4000 << 20, tmp_path)] == []
    alone = UpSettings.model_validate({"model": str(vectors), "kv_host_mb": "auto"}).shared_out()
    assert [finding.text for finding in checks._host_memory(alone, 4000 << 20, tmp_path)] == []


def test_what_is_shared_is_not_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 4000 << 20)
    settings = UpSettings.model_validate({"kv_host_mb": "auto:shared", "prefill": 3, "decode": 1})
    assert settings.shared_out().kv_host_mb == f"{HOST_SHARE * 4000:.0f}:shared"


def test_no_free_memory_is_none_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    assert HostMB.parse("auto:shared").shared_out(2) == "0"
    with pytest.raises(ValueError, match="shares no memory"):
        HostMB.parse("0:shared")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("1000", None),
        ("1001", "for each of 4 workers: more than the 4000 MiB, the memory that is free"),
        ("4001:shared", "--kv-host-mb 4001:shared: more than the 0 MiB, the size of "),
    ],
)
def test_more_than_there_is_is_refused_before_anything_starts(asked: str, said: str | None, tmp_path: Path) -> None:
    settings = UpSettings.model_validate({"kv_host_mb": asked, "prefill": 3, "decode": 1}).shared_out()
    found = [finding.text for finding in checks._host_memory(settings, 4000 << 20, tmp_path / "none")]
    assert len(found) == (said is not None)
    assert all(str(said) in text for text in found)


@pytest.mark.parametrize("text", ["", "-1", "shared", "4096:all", "auto:"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a number of MiB or auto is needed"):
        HostMB.parse(text)
