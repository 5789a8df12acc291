"""Pages written from `bench/results`: docs/benchmarks.md and fidelity.md (`tables`), README (`headline`)."""
