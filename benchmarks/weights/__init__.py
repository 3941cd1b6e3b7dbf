"""Random weights of real shapes: checkpoints on a disk, and weights drawn on the device."""
