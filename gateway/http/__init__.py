"""Connections, bodies and event streams below the application."""
