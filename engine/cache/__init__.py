"""KV memory: the block pool and the tensor it hands out."""
