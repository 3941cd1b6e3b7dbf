"""Measurements against targets: run with `python -m benchmarks.ROOM[.NAME]`, see benchmarks/README.md."""
