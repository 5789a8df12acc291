"""What can be done to branches while they run: tokens come into them.

Knows bodies and the service; texts become tokens elsewhere. Must not know workers.
"""
