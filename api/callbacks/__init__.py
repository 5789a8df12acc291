"""Calls of URLs that requests name and the operator allows.

Knows HTTP, not what is asked: questions and answers are their askers' structs.
"""
