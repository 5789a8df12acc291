"""The HTTP proxy before the gateways, which Ray Serve starts, or the server where there is none.

Knows Ray's environment variables; imports neither Ray nor anything of ours.
"""
