"""Runs the command line: `opt-partition --help`."""

import sys

from opt_partition._cli import main

sys.exit(main())
