"""Runs the command line: `python -m opt_partition --help`."""

import sys

from opt_partition._cli.main import main

sys.exit(main())
