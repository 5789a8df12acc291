"""Mallee serves LLM requests that branch: fork, sample, search and retry over one shared prefix.

Knows only its version; import the package you need (`mallee.client`, `mallee.router`, ...).
"""

__version__ = "0.1.0"
