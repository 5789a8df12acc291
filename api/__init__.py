"""The HTTP API: OpenAI's wire formats and capsules, in front of a `Service`.

Knows JSON, text, server-sent events and HTTP. Must not know Ray, NATS, torch, or how a job is routed.
"""
