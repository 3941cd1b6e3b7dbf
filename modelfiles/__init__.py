"""A model's files: configuration, tokenizer and GGUF's header, as gateway, engine and services read them. No tensor is read."""
