"""Mallee, smg and vLLM in the same faults and with the same inputs."""
