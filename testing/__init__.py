"""Doubles and made-up workloads, shared by tests and benches; `nodes` is the rig of `mallee up`.

Knows `runtime`, `worker`, `mocker` and `traces`, and `nodes` also `actors`. No product package but `cli` may
import it; a module says itself whether it loads torch.
"""
