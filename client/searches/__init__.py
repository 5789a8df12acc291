"""Searches as the SDK runs them: here, over forks, or in the gateway, by one call.

Knows policies, results and calls; must not know the clients, which give it what sends.
"""
