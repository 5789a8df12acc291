"""Timing of steps: closed forms, grids and the tables of others, fitted or measured.

Knows numbers of tokens and seconds. Must not know engines, requests or clocks.
"""

from mallee.mocker.timing.closed import ClosedForm, Fixed, Plane
from mallee.mocker.timing.model import Timing, TimingModel
from mallee.mocker.timing.profiles import load_timing

__all__ = ["ClosedForm", "Fixed", "Plane", "Timing", "TimingModel", "load_timing"]
