"""Model files: found, fetched or converted, their config read, their weights loaded.

Knows formats and names of tensors. Must not know KV memory, steps or sampling.
"""
