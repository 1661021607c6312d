"""The command line: `python -m opt_optax_bridge.checkpoint`."""
