"""What a restore does with every leaf, before and when it does it."""
