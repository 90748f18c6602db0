"""Decode: pull a chain of nodes, run new tokens at their original positions, generate."""
