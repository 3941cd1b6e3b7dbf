"""A checkpoint's files: headers checked before use, encodings of numbers, GGUF's names, fingerprints."""
