"""Programs that fork: search trees and swarms, learned from a trace or made by rules.

Knows forks and waits between requests. Must not know how files hold them, nor engines.
"""
