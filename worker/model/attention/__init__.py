"""Attention over paged KV: how a batch is split (`base`), and one file per backend.

Knows blocks, rows and tensors. Must not know layers, plans or models.
"""
