"""Capsules against computing again, and moves between tiers against plain copies."""
