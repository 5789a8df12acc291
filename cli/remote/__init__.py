"""Commands that ask a running service over HTTP.

Must not load torch or Ray, nor know what serves.
"""
