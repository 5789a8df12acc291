"""Grafana dashboards and Prometheus alerts, made from the catalog of metrics.

Knows PromQL, Grafana's files and what an operator watches. Must not know where metrics are counted.
"""
