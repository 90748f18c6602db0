"""Preset `kvpress`: what the library kvpress, version 0.5.5, keeps, where it errs too.

For comparisons with it; nothing outside this package follows it. A tier t is its
compression ratio 1 − t, and its counts are made of floats as it makes them: int(n·(1 − r))
with 1 − 0.9 = 0.0999…, so of 200 entries tier 0.1 keeps 19. A tier of 1 keeps everything.

- `combinations`: which policies it has; no torch. `scorers`: its scores, where a window or
  sinks are no more than the highest of them. `selection`: what it keeps of these.

Three things differ. Ties go to the lower index of each of its top-k; there they go
anywhere. A context no longer than the window or the sinks, at which it fails, is kept. And
a batch does not exist here, so Critical-AdaKV's budgets are those of one context alone.
"""
