"""HTTP/1.1 towards backends: heads of messages, and connections that are kept.

Must not know what is asked, nor of whom.
"""
