"""The model on a CPU: kernels compiled by numba, products in a CPU's layouts, and `choose`, which takes them.

Kernels know addresses and strides, not models, plans or requests. Nothing here runs, or is read, on CUDA.
"""
