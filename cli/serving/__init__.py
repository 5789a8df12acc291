"""The commands that serve until a signal ends them: `serve`, `up`, `mock` and `picker`.

Knows the settings and the stacks of actors. Must not know how a request is answered.
"""
