"""The screen of `mallee top`: panes that ask a running service again and again.

Alone in knowing textual, which is loaded when the screen opens. Must not wait for the service while it draws.
"""
