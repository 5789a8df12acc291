"""Our numbers beside those of transformers: for `mallee doctor-model` and for tests.

Loads transformers when it is asked for a model of theirs. Must not know who shows the differences.
"""
