"""Quantised keys and values (`kv_cache_dtype`): 8-bit codes in the pool."""

from engine.kernels.codes.codes import KINDS, Codes, Kind, coded, decoded, encoded, numbers_of, opened

__all__ = ["KINDS", "Codes", "Kind", "coded", "decoded", "encoded", "numbers_of", "opened"]
