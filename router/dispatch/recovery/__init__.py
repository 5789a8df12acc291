"""Recovery from workers that die, hang or leave: suspects, probes, capsules that are made again.

Knows shards and texts. Must not know the dispatcher: facts come in by arguments, decisions go out as results.
"""
