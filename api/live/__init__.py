"""Requests while they run and afterwards: the record of their lives, many in one, and over one socket.

Must not know how requests are placed and computed.
"""
