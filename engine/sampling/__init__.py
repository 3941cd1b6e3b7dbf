"""From logits to tokens: the same draw on the host and on the device."""
