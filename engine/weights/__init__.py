"""Reading checkpoints and placing their tensors on a device."""
