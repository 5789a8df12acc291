"""A Mallee of several nodes on one machine: Ray nodes, a NATS cluster and their network.

Knows processes, network namespaces and Ray's commands. Must not know requests, routers or engines.
"""
