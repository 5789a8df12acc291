"""A fleet in virtual time: real routers and engines, made-up clients, one heap of what is due.

Knows workloads, routers and mocked engines. Must not know processes or files, nor the wall clock but to
say how fast the simulation itself was.
"""
