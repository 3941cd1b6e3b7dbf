"""Reading texts, asking for their vectors, writing these."""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any

import httpx

from cli.reach import Gateway
from common.settings import ConfigError

AT_ONCE = 4  # requests
TIMEOUT_S = 600.0
ARRAY = ".npy"


def embed(given: argparse.Namespace, gateway: Gateway) -> None:
    """Write the vectors of all texts, in order. Raises ConfigError, OSError, ValueError, httpx.HTTPError."""
    if given.batch < 1:
        raise ConfigError(f"--batch {given.batch}: at least one text is asked for at a time")
    texts = list(texts_of(given.file, given.field))
    batches = [texts[at : at + given.batch] for at in range(0, len(texts), given.batch)]
    fields: dict[str, Any] = {"model": given.model, "encoding_format": "base64", "truncate_prompt_tokens": -1}
    fields |= {"dimensions": given.dimensions} if given.dimensions else {}
    fields |= {"prompt_name": given.prompt_name} if given.prompt_name else {}
    with gateway.client(timeout_s=TIMEOUT_S) as client, ThreadPoolExecutor(AT_ONCE) as threads:
        found = (row for rows in threads.map(partial(_asked, client, fields), batches) for row in rows)
        if given.out.endswith(ARRAY):
            rows = list(found)
            Path(given.out).write_bytes(as_array(rows))
            print(f"{given.out}: {len(rows)} vectors of {len(rows[0]) // 4 if rows else 0}", file=sys.stderr)
            return
        with _opened(given.out) as out:
            for index, row in enumerate(found):
                out.write(json.dumps({"index": index, "embedding": _floats(row)}) + "\n")


def texts_of(file: str, field: str) -> Iterator[str]:
    """The texts of a file: its lines that aren't empty, or what JSON objects have in a field. Raises ConfigError, OSError."""
    with contextlib.nullcontext(sys.stdin) if file == "-" else Path(file).open(encoding="utf-8") as opened:
        for number, line in enumerate(opened, 1):
            text = line.strip()
            if not text:
                continue
            if text.startswith("{"):
                try:
                    text = json.loads(text)[field]
                except (ValueError, KeyError):
                    raise ConfigError(
                        f"{file}:{number}: no JSON object with {field!r}: name the field by --field"
                    ) from None
                if not isinstance(text, str) or not text:
                    raise ConfigError(f"{file}:{number}: {field} must be a text")
            yield text


def _asked(client: httpx.Client, fields: dict[str, Any], texts: Sequence[str]) -> list[bytes]:
    """The vectors of some texts, as float32. Raises ConfigError, httpx.HTTPError."""
    answer = client.post("/v1/embeddings", json={**fields, "input": list(texts)})
    if answer.status_code != 200:
        try:
            why = answer.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            why = answer.text[:300]
        raise ConfigError(f"the gateway answers {answer.status_code}: {why}")
    return [base64.b64decode(one["embedding"]) for one in answer.json()["data"]]


def as_array(rows: Sequence[bytes]) -> bytes:
    """A .npy file of float32 rows of one width."""
    width = len(rows[0]) // 4 if rows else 0
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({len(rows)}, {width}), }}"
    head += " " * (-(len(head) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode("ascii") + b"".join(rows)


def _floats(row: bytes) -> list[float]:
    found = array("f")
    found.frombytes(row)
    return found.tolist()


@contextlib.contextmanager
def _opened(name: str) -> Iterator[IO[str]]:
    if not name:
        yield sys.stdout
        return
    with Path(name).open("w", encoding="utf-8") as out:
        yield out
