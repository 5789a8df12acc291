"""Session models without their trace: quantile tables and a small copula, from which like sources are drawn.

Knows session models. Must not keep a number of fewer than `tables.K` values.
"""
