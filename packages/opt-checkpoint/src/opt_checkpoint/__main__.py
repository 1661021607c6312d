"""Runs the command line: `python -m opt_checkpoint --help`."""

import sys

from opt_checkpoint._cli import main

sys.exit(main())
