"""Logical axes of an optimizer's state."""
