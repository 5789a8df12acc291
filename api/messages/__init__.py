"""Anthropic's `/v1/messages`: its requests as conversations, and answers, events and errors in its shapes.

Knows request bodies and texts. Must not know workers.
"""
