"""Convert a checkpoint to fewer key/value heads: plan, pool, write, check."""
