"""The engine: prefill, decode and forks (`python -m bench.engine`), planning, what each feature is worth."""
