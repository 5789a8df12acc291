"""The floor of all models: prefix tree, threads, streams of random numbers, begins of sessions, knobs.

Knows traces as arrays. Must not know any one model.
"""
