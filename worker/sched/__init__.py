"""Plans engine steps: which branches prefill, which decode, who waits, who is preempted.

Knows branches and token budgets. Must not know tensors, sampling or the wire.
"""
