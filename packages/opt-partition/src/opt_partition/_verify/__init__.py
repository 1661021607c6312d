"""Verification of the sharding of a compiled training step."""
