"""Tool calls in the text of answers: a file per family's form, read as the text comes, and as a grammar.

Knows conversations' normal form. Must not know requests or HTTP.
"""
