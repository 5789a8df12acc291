"""Files of lines: plain, gzip or zstd, with numbered problems, written whole or not at all.

Must not know what a line means.
"""
