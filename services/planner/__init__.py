"""The planner: which workers prefill and which decode, moved by load and service levels."""
