"""Checks before a start: functions that return findings. `baton up` refuses by them, `baton doctor` shows them."""
