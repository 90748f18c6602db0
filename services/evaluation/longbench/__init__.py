"""LongBench's 16 English datasets (arXiv 2308.14508)."""
