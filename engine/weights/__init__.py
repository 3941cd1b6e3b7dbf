"""Weights as declarations, and the loader that copies a checkpoint's tensors to a device."""
