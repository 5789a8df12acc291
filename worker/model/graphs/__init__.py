"""Decode steps that are recorded once and replayed: `device` records, `decode` says which and when.

Knows rows and plans; doesn't know sequences, capsules or who shares what.
"""
