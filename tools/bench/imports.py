"""What importing each package takes beyond the libraries that it stands on.

    hatch run dev:bench --only imports

Each import runs in a new interpreter, after jax, Flax (linen and nnx) and Optax (contrib); the peer
is 0.2 s, or Orbax for opt_checkpoint. Bytecode is compiled before, whatever the environment says of
writing it: without, most of the time would be the compiler's.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from _common import Row, timed

ALLOWED = 0.2  # seconds
PACKAGES = Path(__file__).parents[2] / "packages"
MODULES = sorted(path.name.replace("-", "_") for path in PACKAGES.glob("*/"))
CODE = """
import jax, flax.linen, flax.nnx, optax, optax.contrib, time
start = time.process_time()
import {}
print(time.process_time() - start)
"""


def import_seconds(modules: str, bytecode: str) -> float:
    """Returns the processor's seconds of one import; the folder caches bytecode."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", CODE.format(modules)]
    done = subprocess.run(command, capture_output=True, check=True, text=True, env=environment)
    return float(done.stdout)


def measure(quick: bool) -> Iterator[Row]:
    """Yields a row per package."""
    rounds = range(1 if quick else 3)
    with tempfile.TemporaryDirectory() as folder:
        import_seconds(", ".join(MODULES), folder)
        for module in MODULES:
            spent = [import_seconds(module, folder) for _ in rounds]
            if module == "opt_checkpoint":  # Orbax alone takes longer than is allowed
                peer = [import_seconds("orbax.checkpoint", folder) for _ in rounds]
                yield timed(module, spent, "orbax.checkpoint", peer)
            else:
                peer = [ALLOWED for _ in rounds]
                yield timed(module, spent, f"{ALLOWED} s", peer, limit=1.0)
