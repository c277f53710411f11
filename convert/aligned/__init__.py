"""Method aligned: fewer K/V heads with little left to recover (docs/method.md).

`moments`, `spectra` and `factors` are the ground on which the closed forms stand: `keys` (and `gained`, where norms
have gains for every head), `values`, `grouping`, `refit`, pure functions over `AttentionWeights` and second moments.
`stock`, `walk`, `work`, `observe` and `replay` take a model through calibration text with one decoder layer in memory;
`heal` trains on what they give. `options` is what a user may choose, `run` puts the steps in order, `predict` and
`estimate` tell before it starts.
"""
