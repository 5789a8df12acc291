"""Whole searches as one request: the policy runs in the gateway, its steps are forks.

Knows requests and answers of searches. Must not know how workers draw: each step is a request of the gateway,
under the search's key, with its limits and place in the queue.
"""
