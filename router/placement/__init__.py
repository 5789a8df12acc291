"""Places requests: prices every worker, chooses one, books it, remembers why; splits fan-outs.

Reads the index, the loads and the members. Must not know gateways, queues or anything that waits.
"""
