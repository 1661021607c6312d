"""Steps on disk: Orbax, and what it lacks."""
