"""Models that we have no family for, computed by `transformers` over our paged cache, at whatever speed.

Its attention interface calls us with the queries, keys and values of each layer; everything else is its own code.
"""

from engine.foreign.choice import is_foreign
from engine.foreign.decoder import ForeignDecoder

__all__ = ["ForeignDecoder", "is_foreign"]
