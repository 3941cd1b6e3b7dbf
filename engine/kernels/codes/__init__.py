"""Quantised keys and values (`kv_cache_dtype`): codes of 8 or 4 bits in the pool."""

from engine.kernels.codes.codes import (
    KINDS,
    LATENT_KINDS,
    Codes,
    Kind,
    coded,
    decoded,
    encoded,
    head_dim,
    headless,
    numbers_of,
    opened,
    part_dims,
    turned,
)

__all__ = [
    "KINDS",
    "LATENT_KINDS",
    "Codes",
    "Kind",
    "coded",
    "decoded",
    "encoded",
    "head_dim",
    "headless",
    "numbers_of",
    "opened",
    "part_dims",
    "turned",
]
