"""Stand-ins that commands use: `nodes`, the rig of `mallee up`, and weights that are drawn.

No product package but `cli` may import it; a module says itself whether it loads torch.
"""
