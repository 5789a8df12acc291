"""One module for each format of trace files: its lines as requests, and for dag-jsonl also the way back.

Knows the fields of other systems' files. Must not know `read` and `write`, which choose among them.
"""
