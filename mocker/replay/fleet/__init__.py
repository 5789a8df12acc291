"""Workers of a replay: engines on one clock, faults, lower memory tiers, transfers of KV.

Knows mocked engines and events. Must not know gateways, routers or requests.
"""
