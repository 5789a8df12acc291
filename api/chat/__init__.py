"""Chat requests: conversations, functions and their choice, and the form of answers with calls.

Knows request bodies and texts. Must not know jobs, streams or answers' bodies.
"""
