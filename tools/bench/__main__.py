"""Runs the benchmarks: one table of every figure beside its peer.

    hatch run dev:bench --quick
    hatch run dev:bench --only steps accumulate

Each file runs in a process of its own, one after the other; see `_common.py` for what it needs.
The exit status is 1 where a file fails or a figure is over its limit by more than its spread.
"""

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in HERE.glob("[!_]*.py"))
PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}
MEMORY = {
    # Keeps the heap between calls as an accelerator's allocator does; else times are page faults.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    # Leaves PyTorch its part of a GPU.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


def run_one(name: str, quick: bool) -> int:
    """Runs a file in this process and prints its rows; returns the exit status."""
    import jax
    import jax.extend

    sys.path.insert(0, str(HERE))
    module = importlib.import_module(name)
    jax.config.update("jax_num_cpu_devices", getattr(module, "DEVICES", 1))
    if jax.device_count() < getattr(module, "DEVICES", 1):  # virtual ones of the CPU
        jax.config.update("jax_platforms", "cpu")
        jax.extend.backend.clear_backends()
    kind, load = jax.devices()[0].device_kind, os.getloadavg()[0]
    print(f"{name}: jax {jax.__version__}, {jax.device_count()} of {kind}, load {load:.1f}")
    is_over = False
    for row in module.measure(quick):
        print(row, flush=True)
        is_over |= row.verdict == "OVER"
    return int(is_over)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--device", choices=PLATFORMS, help="otherwise JAX's choice")
    parser.add_argument("--quick", action="store_true", help="small shapes, few rounds")
    parser.add_argument("--run", choices=NAMES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        return run_one(options.run, options.quick)
    environment = {**os.environ, **MEMORY}
    if options.device:
        environment["JAX_PLATFORMS"] = PLATFORMS[options.device]
    flags = ["--quick"] * options.quick
    failed = []
    for name in options.only:
        command = [sys.executable, str(HERE), "--run", name, *flags]
        if subprocess.run(command, env=environment, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed, or over a limit: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
