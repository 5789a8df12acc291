"""The prefix index: blocks and capsules of every worker, and the hashes that name blocks.

Knows hashes and worker slots. Must not know load, leases, requests or messages' order.
"""
