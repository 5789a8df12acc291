"""Plans engine steps: which branches prefill, decode, wait, or are preempted.

Knows requests, their branches and token budgets. Must not know tensors or how a token is drawn.
"""
