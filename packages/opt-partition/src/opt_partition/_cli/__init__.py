"""The command line: `python -m opt_partition`."""
