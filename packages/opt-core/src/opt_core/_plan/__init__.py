"""Moving state to another optimizer: what becomes of every leaf, decided before any is read."""
