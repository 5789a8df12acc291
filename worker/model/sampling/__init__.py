"""Draws of tokens from logits, and the grammars that constrain them.

Knows logits, sampling settings and token sets. Must not know KV memory, batches or layers.
"""
