"""Tiers below the device: host memory and disk, the blocks that lie there, and the moves between them.

Knows blocks by key, slots of host memory, and moves under way. Must not know capsules, requests or files.
"""
