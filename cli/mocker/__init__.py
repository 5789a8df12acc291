"""The commands about mocked engines: `mock`, `replay`, `sweep`, `figures`, and `profile`, which times models.

Knows the mocker and, for `mock`, the stack around it. Must not load a model but to time one.
"""
