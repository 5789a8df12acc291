"""The service as users start it, over Ray and HTTP (`python -m bench.serve`), beside others."""
