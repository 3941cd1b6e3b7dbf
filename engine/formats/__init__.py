"""How matrices are stored and multiplied. A format is a value: a module of a checkpoint has one, by its `Quantization`."""
