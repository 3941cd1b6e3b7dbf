"""Spans through OpenTelemetry's own SDK. Only a process that sends traces imports this package."""
