"""RULER's 13 tasks: made at any length, or read from its own files (arXiv 2404.06654)."""
