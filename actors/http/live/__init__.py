"""Requests while they run and afterwards: the record of their lives, and many of them in one.

Must not know how requests are placed and computed.
"""
