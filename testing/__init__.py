"""Doubles and made-up workloads, shared by tests and benches.

Knows `actors.bus`, `worker`, `mocker` and `traces`. No product package may import it; a module says
itself whether it loads torch.
"""
