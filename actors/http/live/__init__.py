"""Requests while they run and afterwards: the record of their lives.

Must not know how requests are placed and computed.
"""
