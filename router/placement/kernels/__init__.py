"""Kernels of prices and splits, over flat arrays. They know arrays, not requests."""
