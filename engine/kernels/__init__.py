"""Kernels: each file holds the public function, its plain-torch twin `reference` of the same signature, and the Triton version.

The twin is the CPU's product path and what the Triton kernel is tested against.
"""
