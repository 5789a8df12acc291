"""Faults and hostile load against a running service (`python -m bench.soak`)."""
