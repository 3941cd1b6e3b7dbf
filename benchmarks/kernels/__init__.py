"""Kernels alone, each beside its floor and float64."""
