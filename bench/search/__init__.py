"""Searches over texts: programs that branch, and the ways in which a client can have them served."""
