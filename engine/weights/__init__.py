"""Weights as declarations, and the loader that places a checkpoint's tensors on a device."""
