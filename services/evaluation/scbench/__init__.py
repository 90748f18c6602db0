"""SCBench: one context, many turns or requests (arXiv 2412.10319)."""
