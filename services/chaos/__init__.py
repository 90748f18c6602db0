"""Chaos: seeded load and faults against the running system, and an independent oracle."""
