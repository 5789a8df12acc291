"""Pods that a picker sends requests to: where they are, what they report, what their caches hold.

Knows endpoints, vLLM's metrics and KV events. Must not know gRPC, Envoy or requests.
"""
