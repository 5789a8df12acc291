"""Figures and pages for people: charts in one style, HTML pages that hold them, numbers in words.

Knows arrays, names and captions. Must not know their sources: replays, traces, models.
matplotlib is loaded when something is drawn, not before.
"""
