"""CPUs: the engine beside llama.cpp, and products of quantised weights alone."""
