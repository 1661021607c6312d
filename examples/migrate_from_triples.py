"""One small training loop in four versions: from the classic triples to Optax and opt-core.

    python examples/migrate_from_triples.py

1. The original: `opt_init, opt_update, get_params`.
2. Saved to a file without pickle after some steps, and resumed from it.
3. Switched to the equivalent Optax optimizer in mid-run.
4. As an opt-core `OptimizerDef`, with the state sharded like the parameters over all devices.

Prints the losses of all four side by side, and checks them.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_legacy_stax as stax
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

Params = dict[str, jax.Array]
RATE = stax.exponential_decay(1e-2, decay_steps=20, decay_rate=0.5)
AXES = {"in": P("features", "hidden"), "bias": P("hidden"), "out": P("hidden", None)}
MESH_AXES = {"hidden": "model"}


def init_params(seed: int, features: int = 8, hidden: int = 16) -> Params:
    """Returns a network of two layers."""
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "in": jax.random.normal(first, (features, hidden)) / features**0.5,
        "bias": jnp.zeros(hidden),
        "out": jax.random.normal(second, (hidden, 1)) / hidden**0.5,
    }


def loss_fn(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the mean squared error."""
    hidden = jnp.tanh(x @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


def batch_at(step: int, rows: int = 64, features: int = 8) -> tuple[jax.Array, jax.Array]:
    """Returns the inputs and targets of a step."""
    x = jax.random.normal(jax.random.key(1000 + step), (rows, features))
    return x, jnp.sin(x.sum(axis=1, keepdims=True))


def train_triple(
    triple: stax.Optimizer, state: Any, steps: range
) -> tuple[list[float], stax.OptimizerState]:
    """Trains as code for the triples does."""
    _, opt_update, get_params = triple

    @jax.jit
    def step(i: jax.Array, state: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        loss, grads = jax.value_and_grad(loss_fn)(get_params(state), x, y)
        return loss, opt_update(i, grads, state)

    losses = []
    for i in steps:
        loss, state = step(jnp.int32(i), state, *batch_at(i))
        losses.append(float(loss))
    return losses, state


def train_resumed(
    triple: stax.Optimizer, params: Params, steps: int, stop: int, path: Path
) -> list[float]:
    """Trains up to `stop`, saves; and continues as another process would."""
    before, state = train_triple(triple, triple.init_fn(params), range(stop))
    stax.save(path, state, optimizer=triple)
    restored = stax.load(path, optimizer=triple, params=params)
    after, _ = train_triple(triple, restored, range(stop, steps))
    return before + after


def train_switched(params: Params, steps: int, stop: int) -> list[float]:
    """Trains with the triple up to `stop`, and continues with Optax."""
    equivalent = stax.optax_equivalent("adam", step_size=RATE)
    before, state = train_triple(equivalent.triple, equivalent.triple.init_fn(params), range(stop))
    params, opt_state = equivalent.convert_state(state, stop)

    @jax.jit
    def step(params: Params, opt_state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, Any]:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = equivalent.transformation.update(grads, opt_state, params)
        return loss, optax.apply_updates(params, updates), opt_state

    after = []
    for i in range(stop, steps):
        loss, params, opt_state = step(params, opt_state, *batch_at(i))
        after.append(float(loss))
    return before + after


def train_definition(triple: stax.Optimizer, params: Params, steps: int) -> tuple[list[float], Any]:
    """Trains as an `Optimizer` that is sharded over all devices; returns that, too."""
    definition = stax.to_optimizer_def(triple)
    shapes = jax.eval_shape(definition.create, params)
    axes = definition.derive_logical_axes(shapes, AXES)
    mesh = jax.make_mesh((len(jax.devices()),), ("model",), axis_types=(AxisType.Auto,))

    def sharding(spec: P | None) -> NamedSharding:
        return NamedSharding(mesh, P(*(MESH_AXES.get(str(name)) for name in spec or ())))

    shardings = jax.tree.map(sharding, axes, is_leaf=lambda s: s is None or isinstance(s, P))
    optimizer = jax.jit(definition.create, out_shardings=shardings)(params)

    @jax.jit
    def step(optimizer: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        loss, grads = jax.value_and_grad(loss_fn)(optimizer.target, x, y)
        return loss, optimizer.apply_gradient(grads)

    losses = []
    for i in range(steps):
        loss, optimizer = step(optimizer, *batch_at(i))
        losses.append(float(loss))
    return losses, optimizer


def main(argv: list[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--stop", type=int, default=13, help="where to save, and to switch")
    arguments = parser.parse_args(argv)
    steps, stop = arguments.steps, arguments.stop
    if not 0 < stop < steps:
        parser.error("--stop must be between 0 and --steps")

    triple, params = stax.adam(RATE), init_params(seed=0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        curves = {"resumed": train_resumed(triple, params, steps, stop, path)}
    curves["optax"] = train_switched(params, steps, stop)
    curves["definition"], optimizer = train_definition(triple, params, steps)
    whole, _ = train_triple(triple, triple.init_fn(params), range(steps))
    curves = {"triple": whole, **curves}

    print("  step", *(f"{name:>12}" for name in curves))
    for i in [*range(0, steps, max(steps // 8, 1)), steps - 1]:
        print(f"{i:6}", *(f"{curve[i]:12.8f}" for curve in curves.values()))
    differences = {
        name: float(np.max(np.abs(np.subtract(curve, whole)) / np.abs(whole)))
        for name, curve in curves.items()
    }
    print("differ", *(f"{difference:12.1e}" for difference in differences.values()))
    moments = optimizer.state.param_states["in"]
    print(
        f"one device of {len(jax.devices())} holds {moments[1].addressable_shards[0].data.shape} "
        f"of the {moments[1].shape} entries of Adam's m"
    )
    agree = differences["resumed"] == 0 and max(differences.values()) < 1e-4
    print("the losses agree" if agree else "the losses DIFFER")
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
