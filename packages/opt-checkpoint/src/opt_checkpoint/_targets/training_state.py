"""Plain Optax: a transformation, parameters and a state."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from opt_core import Optimizer, OptimizerDef, OptimizerState
from opt_core.errors import TreeMismatchError
from opt_core.extend import (
    local,
    named_leaves,
    named_state,
    path_str,
    strip_weak_type,
    update_counts,
)
from opt_optax_bridge import OptaxWrapper


@struct.dataclass
class TrainingState:
    """What a training loop of plain Optax carries, as one pytree.

    It is saved, planned and restored like any other optimizer, and goes through `jax.jit` and
    `jax.eval_shape`; `tx` is static. Frozen: `replace` makes another.

    Attributes:
      tx: the transformation.
      params: pytree of parameters; arrays or `jax.ShapeDtypeStruct`s.
      opt_state: what `tx.init(params)` returns, or `tx.update` since.
      step: how many updates have been made. `None` takes the `count` of the state: 0 if it has
        none, an error if it has several that differ or counts mini-steps.

    Examples:
      >>> import optax
      >>> from opt_checkpoint import named_state
      >>> tx, params = optax.adam(0.1), {'w': jnp.ones(2)}
      >>> list(named_state(TrainingState(tx, params, tx.init(params))))
      ['params/w', 'state/step', 'state/adam/count', 'state/adam/mu/w', 'state/adam/nu/w']
    """

    tx: optax.GradientTransformation | optax.MultiSteps = struct.field(pytree_node=False)
    params: Any
    opt_state: Any
    step: Any = 0


def optimizer_of(tx: Any, params: Any, opt_state: Any, step: Any) -> Optimizer:
    """Returns the optimizer with the fields of a `TrainingState`.

    Nothing is copied, and no value changes; Python numbers become arrays. `tx` may be a definition.

    Raises:
      TreeMismatchError: the state is not one of `tx` for these parameters; lists every path.
      TypeError: `tx` is not a transformation of Optax, `params` holds something other than arrays,
        or `step` is not an integer.
      ValueError: `step` is `None`, and the state does not determine it.
    """
    # e.g. `opt_nnx.Optimizer` has a definition in place of a transformation
    if not isinstance(tx, optax.GradientTransformation | optax.MultiSteps | OptimizerDef):
        raise TypeError(
            f"`tx`: expected an `optax.GradientTransformation`, found {type(tx).__name__}"
        )
    if others := [
        f"\n  `{path_str(names)}`: found {type(leaf).__name__}"
        for names, leaf in named_leaves(params)
        if not isinstance(leaf, int | float | complex) and not hasattr(leaf, "dtype")
    ]:
        raise TypeError(
            "`params`: expected arrays; for an Equinox module, pass `eqx.filter(model, "
            "eqx.is_array)`, and `eqx.combine` what is restored with the rest:" + "".join(others)
        )
    definition = tx if isinstance(tx, OptimizerDef) else OptaxWrapper(tx)
    if problems := list(_differences(_expected(definition, params), opt_state)):
        raise TreeMismatchError(
            "`opt_state` is not a state of `tx` for these `params`:\n  "
            + "\n  ".join(problems)
            + "\nGive the transformation that made it, and the parameters that it was made for."
        )
    state = OptimizerState(
        jnp.zeros((), jnp.int32), strip_weak_type(jax.tree.map(_array, opt_state))
    )
    optimizer = Optimizer(definition, state, params)
    step = _step(_count(optimizer) if step is None else step)
    return optimizer.replace(state=state.replace(step=step))


def step_like(given: Any, step: Any) -> Any:
    """Returns a restored step as the target has it: a Python number, or an array of its dtype."""
    if isinstance(given, int) and isinstance(step, jax.Array):
        return int(local(step))
    return step.astype(given.dtype) if hasattr(given, "dtype") else step


def _step(step: Any) -> Any:
    """The step as int32, on its own devices."""
    if np.shape(step) or not jnp.issubdtype(getattr(step, "dtype", type(step)), jnp.integer):
        raise TypeError(f"`step`: expected how many updates have been made, found {step!r:.80}")
    if isinstance(step, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((), jnp.int32, sharding=step.sharding)
    return strip_weak_type(jnp.asarray(step, jnp.int32))


def _expected(definition: OptimizerDef, params: Any) -> Any:
    leaves, structure = jax.tree.flatten(params)
    kinds = tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
    return _initial(definition, structure, kinds, bool(jax.config.read("jax_enable_x64")))


@functools.lru_cache(maxsize=16)  # used by every save of a run
def _initial(
    definition: OptimizerDef, structure: Any, kinds: tuple[Any, ...], has_64_bits: bool
) -> Any:
    params = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*kind) for kind in kinds])
    return jax.eval_shape(definition.init_state, params).param_states


def _array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else jnp.asarray(leaf)


def _differences(expected: Any, found: Any) -> Iterator[str]:
    wanted, given = (
        {path_str(names): _shown(leaf) for names, leaf in named_leaves(tree)}
        for tree in (expected, found)
    )
    for path in {**wanted, **given}:
        before, after = wanted.get(path, "nothing"), given.get(path, "nothing")
        if before != after:
            yield f"`{path}`: expected {before}, found {after}"
    structures: Any = jax.tree.structure(expected), jax.tree.structure(found)
    if wanted.keys() == given.keys() and structures[0] != structures[1]:
        yield f"containers: expected {structures[0]}, found {structures[1]}"


def _shown(leaf: Any) -> str:
    dtype = leaf.dtype if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.result_type(leaf)
    return f"{dtype}{list(np.shape(leaf))}"


def _count(optimizer: Optimizer) -> Any:
    """The count that the state keeps."""
    named = named_state(optimizer)
    counts, is_clear = update_counts(named.schema.leaves)
    if None in counts.values():
        return named[next(iter(counts))]  # abstract: nothing to compare
    if not is_clear:
        counted = ", ".join(f"`{name}` {value}" for name, value in counts.items())
        raise ValueError(
            "`step`: give the number of updates, which the state does not determine: "
            f"{counted or 'it counts mini-steps'}"
        )
    return next(iter(counts.values()), 0)
