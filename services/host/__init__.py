"""The process that loads and unloads models on its machine, as gateways want them."""
