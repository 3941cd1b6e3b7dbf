"""A model as processes must agree on it: its files, and its tokenizer's fingerprint. No tensor is read."""
