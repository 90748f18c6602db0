"""Prefill: compute a context's KV, rank its entries, publish the compressed node."""
