"""Texts as vectors: encoders that see both ways, without KV, and what stands behind them."""
