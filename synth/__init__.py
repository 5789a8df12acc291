"""Trace analysis and synthesis: learns how real agents branch and generates traffic like it.

Knows workloads (`traces`) and how to draw (`figures`). Must not know torch, ray, engines or routers:
whoever compares replays brings them.
"""
