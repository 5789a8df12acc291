"""The scripted server for all of the SDK's tests."""

from support.scripted_api import server

__all__ = ["server"]
