"""Tensors of GGUF files: their names, the order of their rows, and what their bytes mean."""
