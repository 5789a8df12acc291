"""Plans engine steps: which branches prefill, which decode, who waits, who is preempted.

Knows requests, their branches and token budgets. Must not know tensors or how a token is drawn.
"""
