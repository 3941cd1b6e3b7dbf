"""Kernels: a public function in plain torch, and its Triton version in a file `triton_…` beside it, joined by `twin`.

`attention` and `sampling` are folders: an `__init__` as face, the values that describe a pass, the plain version, and one file
for each Triton kernel. Nothing here knows sequences, requests or models.
"""
