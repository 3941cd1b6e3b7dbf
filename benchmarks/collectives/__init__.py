"""Collectives among processes that are ranks of a group on GPUs of one host."""
