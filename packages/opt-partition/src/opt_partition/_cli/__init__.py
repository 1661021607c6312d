"""The command line: `opt-partition`."""
