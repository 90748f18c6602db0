"""Profile: find out which KV heads of a model retrieve."""
