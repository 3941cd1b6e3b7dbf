"""Ops, each computed by all implementations that there are: ours, plain torch, torch's own kernels, and libraries."""
