"""Values that clients can name and that outlive a gateway, in the broker's buckets.

Knows the bus. Must not know what the values mean.
"""
