"""The real forward pass: model files, transformer layers, attention over paged KV, the sampler.

The one place that imports torch. Must not know requests, capsules or routing.
"""
