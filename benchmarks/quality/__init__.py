"""Agreement of what the engine computes with a reference or another format: tokens, perplexity, errors."""
