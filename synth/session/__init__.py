"""The session model: what agents do call by call, learned from a trace and generated anew.

Knows traces as arrays. Must not know files, engines or how figures are drawn.
"""
