"""Kernels of passes over whole texts, one behind the other: of encoders and decoders that pool."""
