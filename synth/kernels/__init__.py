"""Compiled loops over the blocks of a trace.

Knows arrays. Must not know files, models or reports.
"""
