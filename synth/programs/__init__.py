"""Programs that fork: search trees and swarms, learned from a trace or made by parameters.

Knows requests that fork others, and who waits for whom. Must not know how files hold them, nor engines.
"""
