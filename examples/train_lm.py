"""Trains a small byte-level language model on the source of Python's standard library.

    hatch run dev:train
    hatch run dev:train --data ~/texts --steps 5000 --out runs/texts
    hatch run dev:train --resume runs/texts --no-zero --learning-rate 1e-4
    hatch run dev:train --out runs/two --processes 2 --process-id 0 --coordinator localhost:1234

The training code is in `lm/training.py`. It is imported last, so that flags are validated and a
message is shown before JAX is imported, which takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lm.config import UsageError, parse_arguments
from lm.progress import announced


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    try:
        arguments = parse_arguments(argv)
        with announced("Starting", is_shown=not arguments.cluster.process_id):
            from lm.training import run
        return run(arguments)
    except UsageError as error:
        print(f"train_lm: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("train_lm: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
