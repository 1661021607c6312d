"""Gradients of a batch that is too large to be differentiated at once."""
