"""Faults of nodes and of the network between them, under clients that stream."""
