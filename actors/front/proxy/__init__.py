"""The reverse proxy: HTTP/1.1 to clients and to backends, bytes forwarded as they come.

Knows connections, exchanges and their limits. Must not know how a backend is chosen, nor what bodies say.
"""
