"""Keys and values as 8-bit codes in the pool, and as numbers everywhere else."""

from engine.kernels.codes.codes import KINDS, Codes, Kind, coded, decoded, encoded, numbers_of, opened

__all__ = ["KINDS", "Codes", "Kind", "coded", "decoded", "encoded", "numbers_of", "opened"]
