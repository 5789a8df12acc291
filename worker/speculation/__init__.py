"""Drafts of what branches may draw next, so that one pass can verify several tokens of each.

Knows texts of branches, and what drafts were worth. Must not know logits: a draft changes no answer.
"""
