"""Layouts of trees on a mesh, from their logical axes."""
