"""Benchmarks: ratios of things run alternately, medians over repeats, written as JSON."""
