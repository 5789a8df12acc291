"""Copies of KV blocks between device, host memory, disk and other workers, and books of what lies below.

Knows blocks by key, and nothing of the texts, branches and requests that they belong to. Free of torch.
"""
