"""Headers of GGUF files: `gguf` writes them, we read the same; and whatever a file claims, it is refused, by name, or read."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from modelfiles.gguf import GgufError, parts_of, read_header
from tests.examples import examples

METADATA = {
    "llama.block_count": 2,
    "general.name": "äöü",
    "tokenizer.ggml.tokens": ["a", "▁b", ""],
    "x.floats": [0.5, -2.0],
}
MATRIX = np.arange(64 * 2, dtype=np.float32).reshape(2, 64)


def write(file: Path, *, parts: int = 1) -> Path:
    writer = gguf.GGUFWriter(file, "llama", **({"split_max_tensors": 1} if parts > 1 else {}))
    writer.add_uint32("llama.block_count", 2)
    writer.add_string("general.name", "äöü")
    writer.add_bool("x.yes", True)
    writer.add_array("tokenizer.ggml.tokens", ["a", "▁b", ""])
    writer.add_array("x.floats", [0.5, -2.0])
    for part in range(parts):
        writer.add_tensor(
            f"blk.{part}.attn_q.weight",
            gguf.quantize(MATRIX, gguf.GGMLQuantizationType.Q8_0),
            raw_dtype=gguf.GGMLQuantizationType.Q8_0,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf")


def test_what_gguf_wrote_is_read(whole: Path) -> None:
    header = read_header(whole)
    assert {name: header.metadata[name] for name in METADATA} == METADATA
    assert header.metadata["x.yes"] is True
    tensor = header.tensors["blk.0.attn_q.weight"]
    assert (tensor.kind, tensor.shape) == ("Q8_0", (2, 64))
    stored = whole.read_bytes()[tensor.begin : tensor.end]
    assert stored == gguf.quantize(MATRIX, gguf.GGMLQuantizationType.Q8_0).tobytes()


def test_parts_are_one_model(tmp_path: Path) -> None:
    write(tmp_path / "split.gguf", parts=3)
    first = tmp_path / "split-00001-of-00003.gguf"
    header = read_header(first)
    assert [tensor.file.name for tensor in header.tensors.values()] == [file.name for file in parts_of(first)]
    assert set(header.tensors) == {f"blk.{part}.attn_q.weight" for part in range(3)}
    (tmp_path / "split-00002-of-00003.gguf").unlink()
    with pytest.raises(GgufError, match="no split-00002-of-00003"):
        read_header(first)


def test_parts_that_name_one_another_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "split.gguf", parts=2)
    parts = [tmp_path / f"split-{number:05d}-of-00002.gguf" for number in (1, 2)]
    parts[1].write_bytes(parts[0].read_bytes())
    with pytest.raises(GgufError, match=r"00002-of-00002.gguf says that it is part 0"):
        read_header(parts[0])


def test_a_part_alone_says_that_it_is_one(tmp_path: Path) -> None:
    write(tmp_path / "split.gguf", parts=2)
    with pytest.raises(GgufError, match="one of 2 files"):
        read_header((tmp_path / "split-00001-of-00002.gguf").rename(tmp_path / "model.gguf"))


@given(length=st.integers(0, 2000))
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_cut_short_is_refused(whole: Path, tmp_path: Path, length: int) -> None:
    end = max(tensor.end for tensor in read_header(whole).tensors.values())
    (tmp_path / "cut.gguf").write_bytes(whole.read_bytes()[: min(length, end - 1)])
    with pytest.raises(GgufError, match=r"cut\.gguf"):
        read_header(tmp_path / "cut.gguf")


@given(changes=st.lists(st.tuples(st.integers(0, 500), st.sampled_from(["<B", "<I", "<Q"]), st.integers(0, 2**64 - 1))))
@examples(160, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_file_claims_no_tensor_leaves_it(
    whole: Path, tmp_path: Path, changes: list[tuple[int, str, int]]
) -> None:
    content = bytearray(whole.read_bytes())
    for at, form, value in changes:
        struct.pack_into(form, content, min(at, len(content) - 8), value % (1 << 8 * struct.calcsize(form)))
    (tmp_path / "changed.gguf").write_bytes(content)
    try:
        header = read_header(tmp_path / "changed.gguf")
    except GgufError:
        return
    spans = sorted((tensor.begin, tensor.end) for tensor in header.tensors.values())
    assert all(0 < begin < end <= len(content) for begin, end in spans)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def file_of(*, tensors: int = 0, entries: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"PK\3\4" + bytes(60), "does not begin with GGUF"),
        (file_of(version=1), "version 1"),
        (file_of(version=3 << 24), "big-endian"),
        (file_of(tensors=2**63), "more than any model has"),
        (file_of(entries=2**40), "more than any model has"),
        (file_of(entries=1, rest=struct.pack("<Q", 2**62)), "a name of"),
        (file_of(entries=1, rest=text(b"") + struct.pack("<IB", 0, 1)), "a name of 0 bytes"),
        (file_of(tensors=1, rest=text(b"") + struct.pack("<IQIQ", 1, 1, 0, 0) + bytes(64)), "a name of 0 bytes"),
        (file_of(tensors=1, rest=text(b"t") + struct.pack("<IQIQ", 1, 1, 0, 3) + bytes(64)), "'t' lies at 3"),
        (file_of(entries=1, rest=text(b"k") + struct.pack("<IQ", 8, 2**62)), "more than the file"),
        (file_of(entries=1, rest=text(b"k") + struct.pack("<IIQ", 9, 8, 2**62)), "more than 16777216 values"),
        (file_of(entries=1, rest=text(b"k") + struct.pack("<IIQ", 9, 4, 2**23)), "more than the file"),
        (file_of(entries=1, rest=text(b"k") + struct.pack("<IIQ", 9, 9, 1)), "unknown kind 9"),
        (file_of(entries=1, rest=text(b"k") + struct.pack("<I", 99)), "unknown kind 99"),
        (file_of(entries=2, rest=2 * (text(b"k") + struct.pack("<IB", 0, 1))), "'k' is there twice"),
        (file_of(entries=1, rest=text(b"\xff") + struct.pack("<IB", 0, 1)), "utf-8"),
        (file_of(tensors=1, rest=text(b"t") + struct.pack("<I", 5)), "5 dimensions"),
        (file_of(tensors=1, rest=text(b"t") + struct.pack("<IQIQ", 1, 33, 8, 0)), "no whole blocks of Q8_0"),
        (file_of(tensors=1, rest=text(b"t") + struct.pack("<IQIQ", 1, 32, 77, 0)), "unknown kind 77"),
        (file_of(tensors=1, rest=text(b"t") + struct.pack("<IQQIQ", 2, 2**39, 2**39, 0, 0)), "the file has"),
        (file_of(tensors=1, rest=text(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0)), "dimensions"),
        (file_of(tensors=1, rest=text(b"t") + struct.pack("<IQIQ", 1, 1, 0, 2**63) + bytes(64)), "the file has"),
        (
            file_of(
                tensors=2, rest=b"".join(text(n) + struct.pack("<IQIQ", 1, 16, 0, 0) for n in (b"a", b"b")) + bytes(99)
            ),
            "begins within",
        ),
    ],
)
def test_a_claim_beyond_the_file_or_the_format_is_named(content: bytes, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "hostile.gguf").write_bytes(content)
    with pytest.raises(GgufError, match=complaint):
        read_header(tmp_path / "hostile.gguf")
