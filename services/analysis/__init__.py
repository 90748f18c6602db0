"""Analysis: what a policy kept, and what that changed in the attention output."""
