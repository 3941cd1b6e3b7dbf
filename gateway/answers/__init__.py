"""Text to tokens and tokens to text: templates, tokenizer, detokenizer, stop strings, choices."""
