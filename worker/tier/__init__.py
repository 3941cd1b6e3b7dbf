"""The host tier of the KV cache: blocks that the device's pool evicted, found again in host memory."""
