"""Spans of transfers, for an OpenTelemetry collector."""
