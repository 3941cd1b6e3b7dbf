"""The planner process: moves workers between prefill and decode by load and service levels."""
