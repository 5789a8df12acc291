"""KV from process to process over sockets: blocks are asked for, held where they are, and read by place.

`client.KvClient` is a `Lender` of blocks of other processes, `server.KvServer` serves one to them: NIXL
would be another pair (`worker.transfer.values`). Knows bytes, bounds and ends. Must not know engines,
capsules or Ray.
"""
