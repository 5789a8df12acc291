"""The gateway of a replay: a shell over the dispatcher that serves, in virtual time, and named texts.

Knows the fleet, the router and `router.dispatch`. Must not know clients or records.
"""
