"""What outlives a gateway: values that clients can name, in the broker's buckets."""
