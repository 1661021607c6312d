"""Derivation of the logical axes of an optimizer state."""
