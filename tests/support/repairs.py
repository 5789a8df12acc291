"""A candidate that repairs the function of `examples/self_repair.py`, and a model for its runs."""

from bench.doubles.random_model import random_model

MODEL = random_model("llama", 5, max_position_embeddings=16384, eos_token_id=None)

GOOD = """\
def median(values):
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2
"""
