"""Runs the command line: `python -m opt_optax_bridge.checkpoint --help`."""

import sys

from opt_optax_bridge.checkpoint._cli.main import main

sys.exit(main())
