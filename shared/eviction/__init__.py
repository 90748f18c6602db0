"""Eviction = scorer × allocator × selector, named by a Policy.

    queries, keys, values ── scorer ──> LayerScores ── Plan: allocator, selector ──> mask
                                                                     │ per tier
                                         shared/cache/ranking.py: one order per head

- `scores`: LayerScores, value norms put to use; `window`, `replay`: the scorers.
- `orders`: exact counts, deterministic top-k; `allocators`; `selectors`; `plan`.

Adding a method
---------------
1. Scorer: a file that makes a LayerScores; scores ≥ 0 if a critical selector is to
   multiply them. Allocator or selector: a function in its file, entered in the table
   at the file's end.
2. Add its name to the Literal in `policy`; a new parameter is a field of Policy (and
   so part of every node's identity), with bounds and a default.
3. Write the slow oracle of its formula in `tests/shared/eviction/test_selection.py`; the
   parametrized tests then cover it with every other part.
4. Nothing to prove: ranking verifies that each tier includes the one below, and keeps
   only the highest when a method is not nested.

This package imports no torch by itself, so that the gateway can read policies.
"""
