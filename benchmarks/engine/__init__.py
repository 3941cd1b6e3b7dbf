"""The engine without bus and gateway: its table beside floors, a process's start, profiles, answers inside a grammar."""
