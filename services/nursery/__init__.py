"""The process from which `baton up` forks its CPU workers."""
