"""What the leaves of a state mean."""
