"""The HTTP front: OpenAI's API over prefill, decode and the store."""
