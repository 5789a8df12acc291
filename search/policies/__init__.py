"""The policies that come with Mallee, a file for each kind, and their names.

Know the tree and the Protocol. Must not know who draws and who scores.
"""
