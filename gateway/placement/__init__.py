"""Placement: where a request is prefilled and decoded."""
