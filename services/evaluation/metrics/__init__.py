"""Metrics, as the benchmarks' authors define them."""
