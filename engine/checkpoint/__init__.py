"""A checkpoint's files: validated headers, encodings of numbers, GGUF's names, fingerprints."""
