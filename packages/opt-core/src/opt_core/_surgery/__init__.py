"""Changing the groups of an optimizer that has been trained."""
