"""Reports of replays: tables, figures, a page, sweeps over fleets.

Knows results of `mocker.replay` and `mocker.sweeps`, and how to draw them. Must not know engines or routers.
matplotlib is loaded when something is drawn, not before.
"""
