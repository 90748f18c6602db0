"""Eviction = scorer × allocator × selector, named by a Policy.

    ContextLayer ── scorer ──> LayerScores ── Plan: allocator, selector ──> mask
                                                         │ per tier
                             shared/cache/ranking.py: one order per head

- `policy`, `parameters`: the names; `context_layer`: what a scorer sees.
- `scorers/`, `allocators/`, `selectors/`: one method per file.
- `official`: which policies have an official form; the parts that differ ask for the preset.
- `kvpress/`: preset `kvpress`, another library's choices; `Plan` and `scorers/lookup` lead there.
- `scores`: LayerScores, value norms put to use; `orders`: exact counts, deterministic
  top-k; `plan`; `profile`: a model's head importance.

Adding a method
---------------
1. A file with one function, entered in the table of its folder's `__init__`. Scorer:
   `(policy, layer) -> LayerScores`, scores ≥ 0 so that critical selectors may multiply
   them (map them monotonically if need be). Allocator: `(contest) -> budgets`. Selector:
   `(candidates, budgets, policy) -> mask`.
2. Its name in the Literal in `policy`, its parameters in `parameters`; a new parameter
   is a field of Policy, with bounds and a default, and so part of every node's identity.
3. The slow oracle of its formula in `tests/shared/eviction/`; the parametrized tests
   then cover it with every other part.
4. Nothing to prove: ranking verifies that each tier includes the one below, and keeps
   only the highest when a method is not nested.

This package imports no torch by itself, so that the gateway can read policies.
"""
