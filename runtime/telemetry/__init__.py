"""Metric families and their text for Prometheus, a process's own port for them, logs and spans.

Modules that count declare their own: `gateway.metrics`, `actors.hosting.meters`, `actors.front.counts`
(these it must not know, nor the API).
"""
