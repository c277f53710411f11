"""Recover quality after a conversion with a little more training."""
