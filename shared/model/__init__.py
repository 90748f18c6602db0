"""Models: where they come from, what identifies them, and how they run."""
