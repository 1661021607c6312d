"""What importing each package takes beyond the libraries that it stands on.

    hatch run dev:python tools/bench/imports.py

Each import runs in a new interpreter. The peer has imported jax, Flax (linen and nnx) and Optax
(contrib) before; ours imports one package after them, whatever else that brings. Bytecode is
compiled before, whatever the environment says of writing it: without, most of the time would be
the compiler's.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from _common import Figure, Row, main, timed

LIBRARIES = "import jax, flax.linen, flax.nnx, optax, optax.contrib"
ALLOWED = 0.2  # seconds
PACKAGES = Path(__file__).parents[2] / "packages"
MODULES = sorted(path.name.replace("-", "_") for path in PACKAGES.iterdir())
FIGURES = {
    **{module: Figure(f"{ALLOWED} s", 1.0) for module in MODULES if module != "opt_checkpoint"},
    "opt_checkpoint": Figure("orbax.checkpoint after the libraries"),
}


def import_seconds(statement: str, bytecode: str, before: str = LIBRARIES) -> float:
    """Returns the processor's seconds of one import after others.

    Args:
      statement: the import.
      bytecode: the folder that caches bytecode.
      before: the imports that do not count.
    """
    clock = "import time; t = time.process_time()"
    code = f"{before}\n{clock}\n{statement}\nprint(time.process_time() - t)"
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, check=True, text=True, env=environment)
    return float(done.stdout)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--rounds", type=int, default=3)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields a row per package."""
    rounds = 1 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as folder:
        import_seconds("\n".join(f"import {module}" for module in MODULES), folder)
        for module in MODULES:
            spent = [import_seconds(f"import {module}", folder) for _ in range(rounds)]
            peer = [ALLOWED] * rounds
            if module == "opt_checkpoint":  # Orbax alone takes longer than is allowed
                peer = [import_seconds("import orbax.checkpoint", folder) for _ in range(rounds)]
            yield timed(module, spent, peer)


if __name__ == "__main__":
    main(__doc__, FIGURES, measure, arguments)
