"""Functions that decide which mini-steps are skipped."""
