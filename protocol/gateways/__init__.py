"""Messages between gateways about what clients left and run: texts of capsules, sessions.

Knows ids and the messages of workers. Nothing of buses.
"""
