"""The device of a worker: passes one after another, how many prompt tokens join them, and when it is broken."""
