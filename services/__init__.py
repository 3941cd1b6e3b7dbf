"""What runs: one folder a process, wiring only. Nobody imports it."""
