"""The demo model: made-up text, its training and its weights."""
