"""Eviction = scorer × allocator × selector, named by a Policy."""
