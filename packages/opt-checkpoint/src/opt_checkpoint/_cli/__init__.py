"""The command line: `opt-checkpoint`."""
