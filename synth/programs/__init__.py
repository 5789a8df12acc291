"""Programs that fork: search trees and swarms, learned from a trace or made by rules.

Knows requests that fork others, and who waits for whom. Must not know how files hold them, nor engines.
"""
