# mypy: allow-untyped-calls
"""Files of torch.save: what they hold is read without running anything, and anything but tensors is refused."""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from modelfiles.torchfile import FileTensor, TorchFileError, read_torch_file

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def tensor_of(one: FileTensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(one.values), dtype=DTYPES[one.dtype]).view(one.shape)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_tensors_are_those_that_were_saved(dtype: torch.dtype, tmp_path: Path) -> None:
    saved = torch.nn.Linear(8, 3).to(dtype).state_dict()
    torch.save(saved, tmp_path / "head.pt")
    found = read_torch_file(tmp_path / "head.pt")
    assert found.keys() == saved.keys()
    for name, one in saved.items():
        assert torch.equal(tensor_of(found[name]), one)


def test_parts_of_one_storage_are_read(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(4, 3)
    torch.save({"top": whole[:2], "rest": whole[2:]}, tmp_path / "head.pt")
    found = read_torch_file(tmp_path / "head.pt")
    assert torch.equal(tensor_of(found["rest"]), whole[2:])
    assert found["top"].shape == (2, 3)


class Guilty:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("it ran",)


@pytest.mark.parametrize(
    ("saved", "says"),
    [
        ({"weight": Guilty()}, "print makes no tensor"),
        (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear makes no tensor"),
        ({"weight": torch.zeros(2, dtype=torch.int64)}, "torch.LongStorage makes no tensor"),
        ({"weight": torch.arange(6.0).view(2, 3).T}, "not contiguous"),
        ({"weight": torch.zeros(2), "step": 3}, "it holds something else, too"),
        ({3: torch.zeros(2)}, "no plain dictionary of tensors"),
        ([torch.zeros(2)], "EMPTY_LIST makes no tensor"),
        (torch.zeros(2), "no plain dictionary of tensors"),
        (OrderedDict(a=torch.zeros(2), b=OrderedDict()), "it holds something else, too"),
    ],
)
def test_anything_else_is_refused_and_not_run(
    saved: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(saved, tmp_path / "head.pt")
    with pytest.raises(TorchFileError, match=says):
        read_torch_file(tmp_path / "head.pt")
    assert capsys.readouterr().out == ""


def rewritten(file: Path, changes: dict[str, bytes | None], compression: int = zipfile.ZIP_STORED) -> Path:
    """The file with other records."""
    with zipfile.ZipFile(file) as opened:
        records = {name: opened.read(name) for name in opened.namelist()}
    for ending, value in changes.items():
        [name] = [name for name in records if name.endswith(ending)]
        records[name] = b"" if value is None else value
        if value is None:
            del records[name]
    with zipfile.ZipFile(file, "w", compression) as made:
        for name, value in records.items():
            made.writestr(name, value)
    return file


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data.pkl": None}, "no description"),
        ({"data.pkl": b"\x80\x02}"}, "no plain dictionary"),
        ({"data.pkl": b"\x80\x02}q\x00h\x07."}, "no plain dictionary"),
        ({"data.pkl": b"\x80\x02." + b"0" * (1 << 16)}, "no description of tensors, or one of over"),
        ({"data/0": b"\0\0"}, "numbers are missing"),
        ({"data/0": None}, "numbers are missing"),
        ({"byteorder": b"big"}, "another order of bytes"),
    ],
)
def test_what_is_cut_or_made_up_is_refused(changes: dict[str, bytes | None], says: str, tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(4)}, tmp_path / "head.pt")
    with pytest.raises(TorchFileError, match=says):
        read_torch_file(rewritten(tmp_path / "head.pt", changes))


def test_what_grows_when_it_is_read_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1 << 20)}, tmp_path / "head.pt")
    with pytest.raises(TorchFileError, match="compressed"):
        read_torch_file(rewritten(tmp_path / "head.pt", {}, zipfile.ZIP_DEFLATED))
    (tmp_path / "none.pt").write_bytes(b"\x80\x02}.")
    with pytest.raises(TorchFileError, match=r"not as torch\.save writes it since 1\.6"):
        read_torch_file(tmp_path / "none.pt")
    with (tmp_path / "large.pt").open("wb") as opened:
        opened.truncate((64 << 20) + 1)
    with pytest.raises(TorchFileError, match="at most 67108864"):
        read_torch_file(tmp_path / "large.pt")
