"""Kernels in Triton for CUDA devices, one file an idea.

Knows addresses and numbers. Must not know requests, models or batches. Each module imports triton, and is
itself imported by what launches it.
"""
