"""Spans of requests, in OpenTelemetry's form.

Knows the names of spans and attributes, and when each begins and ends. Must not know what is decided about a
request. Without `OTEL_` variables that ask for spans nothing here is made, and OpenTelemetry is not imported.
"""
