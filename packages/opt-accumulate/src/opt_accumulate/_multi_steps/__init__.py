"""Accumulation of gradients over mini-steps."""
