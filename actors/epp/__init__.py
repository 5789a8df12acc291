"""The endpoint picker of the Gateway API inference extension: Mallee's router in front of vLLM pods.

Knows Envoy's external processing, vLLM's metrics and KV events, Kubernetes' API. Must not know Ray, torch,
Mallee's own engines or their transport.
"""
