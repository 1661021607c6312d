"""What a compiled step does, held against what was asked."""
