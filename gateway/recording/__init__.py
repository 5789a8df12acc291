"""Records of sessions while they run: what a gateway's requests ask and get, appended to files.

Knows jobs, updates and a folder; must not know HTTP, sockets or workers.
"""
