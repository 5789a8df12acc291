"""The router: its speed and memory (`python -m bench.router`), and what its decisions are worth."""
