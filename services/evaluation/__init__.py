"""Evaluation: cases with known answers, and how close a compressed cache stays to the full."""
