"""Before every route: the gate, the caller and its limits, the body's size and time.

Must not know what the routes do.
"""
