"""Admission: which requests start, which wait, and which are refused."""
