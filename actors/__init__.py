"""The processes of the service: Ray Serve app, HTTP API, NATS bus, metrics.

I/O lives here, in `cli` and in `client`. Decisions live in `router`, token work in `worker`.
"""
