"""The commands about mocked engines: `replay`, `sweep`, and `profile`, which times models.

Knows the mocker. Must not load a model but to time one.
"""
