"""Sessions on file: their format, their replay on an engine, their arrays for other readers.

Knows commands and engines; must not know sockets, HTTP, files' places or Ray: bytes come in, bytes go out.
"""
