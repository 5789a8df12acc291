"""The HTTP proxy before the gateways, which Ray Serve starts: which one, and with what.

Knows Ray's environment variables; imports neither Ray nor anything of ours.
"""
