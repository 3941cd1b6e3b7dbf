"""Sampling: the same draw from logits on the host and on the device."""
