"""A short training run on 8 devices, the same bits every time; prints the hash of what it ends in.

Clipped AdamW in a schedule, with windows of two mini-steps, over a mesh of 4 x 2, its state
sharded over the data axis besides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import jax
import opt_accumulate
from elastic_case import abstract, adamw, bits, compile_step, create, make_mesh


def compiled_run(*, donate: bool) -> Callable[[], str]:
    """A run that makes six steps and returns the hash of the bits of every leaf."""
    mesh = make_mesh(4, 2)
    definition = adamw(lambda tx: opt_accumulate.MultiSteps(tx, 2))
    target = abstract(definition, mesh, zero=True)
    step = compile_step(target, mesh, donate=donate)

    def run() -> str:
        optimizer = create(target)
        for i in range(6):
            optimizer, _ = step(optimizer, i)
        digest = hashlib.sha256()
        for name, array in bits(optimizer).items():
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(array.tobytes())
        return digest.hexdigest()

    return run


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    print(compiled_run(donate=True)())
