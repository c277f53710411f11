"""Measure checkpoints: perplexity and key/value-cache bytes, before and after."""
