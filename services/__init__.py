"""The processes, one folder each: wiring only; `runtime` is shared. Only `cli` imports it."""
