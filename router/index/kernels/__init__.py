"""Compiled kernels over flat int64 arrays, for `router.index.index` and `router.load.slots`.

They know arrays, not workers or requests, and allocate nothing: the classes that own the arrays do.
"""
