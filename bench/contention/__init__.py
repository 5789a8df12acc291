"""Engines that share one device (`python -m bench.contention`), in virtual time and as processes."""
