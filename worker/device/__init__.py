"""The device of a worker: the pipeline of passes, the prompt tokens that join them, and its health."""
