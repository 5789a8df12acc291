"""Compiled CPU kernels for steps that no torch operation does in one go.

They know addresses and strides, not models, plans or requests; the callers in `worker.model` check shapes.
"""
