"""Execution of passes: packing, launching, captured graphs, results."""
