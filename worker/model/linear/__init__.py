"""Products with a weight matrix: stored forms, and for each the product that a machine does best.

Knows torch and the forms of single matrices. Must not know layers, files or names of tensors.
"""
