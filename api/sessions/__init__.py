"""Sessions of clients: their names in requests, and the endpoints that show their trees.

Knows headers and bodies. Trees are the gateway's.
"""
