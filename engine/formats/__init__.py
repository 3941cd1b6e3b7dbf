"""Storage formats of matrices and their products. A format is a value: a module has one, from its `Quantization`."""
