"""Our kernels on CUDA: small operations and draws in Triton, and what launches them.

They know addresses and strides, not models, plans or requests; the callers in `worker.model` check shapes.
"""
