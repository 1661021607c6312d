"""Runs the command line: `opt-partition --help`."""

import sys

from opt_partition._cli.main import main

sys.exit(main())
