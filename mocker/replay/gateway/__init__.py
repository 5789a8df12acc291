"""The gateway of a replay: requests, their dispatches and shards, commands, the waiting queue.

Knows the fleet and the router. Must not know clients or records.
"""
