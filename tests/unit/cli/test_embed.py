"""`baton embed`: texts of lines and of JSON, and arrays that numpy reads."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from cli.embed.vectors import as_array, texts_of
from common.settings import ConfigError


def test_texts_are_lines_or_fields_of_json(tmp_path: Path) -> None:
    file = tmp_path / "texts"
    file.write_text('one text\n\n{"text": "another", "id": 3}\n  third  \n')
    assert list(texts_of(str(file), "text")) == ["one text", "another", "third"]


@pytest.mark.parametrize("line", ['{"body": "x"}', '{"text": 3}', "{broken"])
def test_a_line_without_a_text_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "texts"
    file.write_text(f"good\n{line}\n")
    with pytest.raises(ConfigError, match=f"{file}:2: "):
        list(texts_of(str(file), "text"))


@pytest.mark.parametrize("shape", [(0, 0), (1, 3), (5, 384)])
def test_numpy_reads_the_array(shape: tuple[int, int]) -> None:
    wanted = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    found = np.load(io.BytesIO(as_array([row.tobytes() for row in wanted])))
    np.testing.assert_array_equal(found, wanted)
