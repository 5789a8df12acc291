"""Bodies that are files: capsules that are sent, and those that come.

Knows HTTP and the query of an import. Must not know a file's format, or hold one in memory.
"""
