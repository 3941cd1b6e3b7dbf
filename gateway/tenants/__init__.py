"""Tenants, their keys, their budgets."""
