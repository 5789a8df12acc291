"""A local deployment that a real Prometheus scrapes, traffic for its metrics, and pictures of dashboards."""
