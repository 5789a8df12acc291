"""The gateway: added latency and throughput (`python -m bench.gateway`), events, idle memory."""
