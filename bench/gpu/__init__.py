"""Benches of the GPU path, over random weights of real shapes. `python -m bench.gpu_check` runs them all.

Each takes a device and a scale: `tiny` shapes on a CPU prove their logic, and no figure.
"""
