"""Benches of the router in front of others' engines."""
