"""Folders with short paths, as the sockets of Ray and HAProxy need them."""

import tempfile


def short_folder() -> "tempfile.TemporaryDirectory[str]":
    """A folder that goes at its end, but for what processes that were just killed still write there."""
    return tempfile.TemporaryDirectory(prefix="mallee-", ignore_cleanup_errors=True)
