"""Models without a family of ours, computed by `transformers` over our paged KV cache, at lower speed.

Its attention interface calls us with the queries, keys and values of each layer; everything else is its own code.
"""

from engine.foreign.choice import is_foreign
from engine.foreign.decoder import ForeignDecoder

__all__ = ["ForeignDecoder", "is_foreign"]
