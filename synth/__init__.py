"""Trace analysis and synthesis: learns how real agents branch and generates traffic like it.

Knows only `protocol` (workload rows). Must not know torch, ray or the engine. Empty so far.
"""
