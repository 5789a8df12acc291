"""Doubles that benches and tests share: forward pass, model, grammars, bus, pods; and made-up workloads."""
