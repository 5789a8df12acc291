"""Sessions of clients as trees of capsules, known to every gateway.

Knows names of sessions and capsules. Nothing of text, of HTTP, or of where capsules lie.
"""
