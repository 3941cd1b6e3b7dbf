"""A model, as far as processes must agree on it: where its files are, and what text means as tokens. No tensor is read."""
