"""Callers of the API: their keys, tenants, rights and limits.

Knows no routes and no jobs; the HTTP side asks it about each request.
"""
