"""Faults under load over the real service (`python -m bench.failover`)."""
