"""Searches, as the SDK runs them: here, or by one call in the gateway."""
