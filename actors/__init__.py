"""Everything that runs as a service: Ray Serve app, HTTP API, NATS bus, metrics, command line.

The only room with I/O besides `client`. Decisions live in `router`, token work in `worker`.
"""
