"""Plans of a restore, and carrying them out."""
