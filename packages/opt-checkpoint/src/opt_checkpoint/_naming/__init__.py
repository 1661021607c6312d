"""Names by meaning: what a checkpoint holds, and who wrote it."""
