"""The one block hash: keyed BLAKE2b-128 over (parent digest, little-endian u32 token ids).

The chain's root covers everything that makes KV bytes incompatible: model fingerprint, KV dtype, block size, adapter, and
the tenant's salt. The readiness probe compares the hashes of gateway and workers.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

DIGEST_BYTES = 16
_KEY = b"baton.block.v1"


def hash_root(*, model: str, kv_dtype: str, block_size: int, adapter: str = "", salt: str = "") -> bytes:
    """Return the 16-byte root digest. Fields are length-prefixed, so no two tuples can collide by concatenation."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, key=_KEY)
    for field in (model, kv_dtype, str(block_size), adapter, salt):
        raw = field.encode()
        digest.update(struct.pack("<I", len(raw)) + raw)
    return digest.digest()


def tokenizer_fingerprint(content: bytes) -> str:
    """Return 32 hex digits over a tokenizer.json: two equal ones map text to the same tokens."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES, key=b"baton.tokenizer.v1").hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """The facts that two workers must share to use each other's blocks."""

    model: str  # fingerprint
    kv_dtype: str
    block_size: int

    def __str__(self) -> str:
        """The name of this kind in Redis."""
        return f"{self.model}/{self.kv_dtype}/{self.block_size}"

    def root(self, *, adapter: str = "", salt: str = "") -> bytes:
        """The root of these blocks' hash chain."""
        return hash_root(
            model=self.model, kv_dtype=self.kv_dtype, block_size=self.block_size, adapter=adapter, salt=salt
        )


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the digest of one full block whose predecessor has digest `parent`."""
    return hashlib.blake2b(parent + pack_tokens(token_ids), digest_size=DIGEST_BYTES, key=_KEY).digest()


def hash_blocks(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return the digests of all *full* blocks of `token_ids`, in order. The trailing partial block has none."""
    return list(iter_hashes(root, token_ids, block_size))


def iter_hashes(root: bytes, token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    """`hash_blocks`, lazily: a caller may need only the first few."""
    packed, stride, parent = pack_tokens(token_ids), 4 * block_size, root
    begin = hashlib.blake2b(digest_size=DIGEST_BYTES, key=_KEY).copy  # cheaper than parsing the arguments again
    for end in range(stride, len(packed) + 1, stride):
        digest = begin()
        digest.update(parent + packed[end - stride : end])
        parent = digest.digest()
        yield parent


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Pack token ids as little-endian uint32. Raises OverflowError for a negative or too large id."""
    packed = array("I", token_ids)
    if packed.itemsize != 4:  # pragma: no cover - no platform of ours
        raise RuntimeError("array('I') is not 32 bits wide here")
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Reverse `pack_tokens`. Raises ValueError when the length is no multiple of 4."""
    values = array("I")
    values.frombytes(packed)
    return values.tolist()
