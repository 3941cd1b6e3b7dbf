"""The owner of every request: attempts, what workers say, what time brings."""
