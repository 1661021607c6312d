"""Every optimizer as an `OptimizerDef`: all that Optax exports, wrapped, and our own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_accumulate
import opt_adafactor
import opt_legacy_stax
import opt_optax_bridge
import optax
from opt_core import MultiOptimizer, Optimizer, OptimizerDef
from opt_optax_bridge import OptaxWrapper
from optax_case import Case
from optax_table import TABLE
from partition_oracles import is_key, loss, structs

Tree = Any
SHAPES: dict[str, Any] = {
    "scalar": (),
    "bias": (8,),
    "square": (8, 8),
    "layers": {"w": (2, 8, 4)},
    "empty": (0, 8),
}


def _groups(matrices: OptimizerDef, rest: OptimizerDef) -> OptimizerDef:
    return MultiOptimizer((("square|layers/.*", matrices), ("scalar|bias|empty", rest)))


def _guarded() -> OptimizerDef:
    skip = opt_accumulate.skip_not_finite
    return OptaxWrapper(opt_accumulate.MultiSteps(optax.adamw(1e-2), 2, should_skip_update_fn=skip))


# What each dimension of a stack of matrices is; other parameters go by their sizes.
_STACKED = opt_adafactor.HParamMap(
    [("layers", ("batch", "row", "column")), (".*", opt_adafactor.HEURISTIC_RULE)]
)
OURS: dict[str, Callable[[], OptimizerDef]] = {
    "our Adafactor": lambda: opt_adafactor.Adafactor(
        1e-2, factor_map=_STACKED, min_dim_size_to_factor=4
    ),
    "our Adafactor: unfactored": lambda: opt_adafactor.Adafactor(
        1e-2, beta1=0.9, factored=False, dtype_momentum=jnp.bfloat16
    ),
    "our MultiOptimizer": lambda: _groups(
        opt_optax_bridge.adam(1e-2), opt_optax_bridge.sgd(0.1, momentum=0.9)
    ),
    "our MultiOptimizer: Adafactor": lambda: _groups(
        opt_adafactor.Adafactor(1e-2, factor_map=_STACKED), opt_optax_bridge.adam(1e-2)
    ),
    "our MultiSteps": _guarded,
    "our triple": lambda: opt_legacy_stax.to_optimizer_def(opt_legacy_stax.momentum(0.1, 0.9)),
}
NAMES = (*TABLE, *OURS)
_OWN_CASE = Case(lambda params: optax.identity())


def case_of(name: str) -> Case:
    """How an optimizer must be treated."""
    return TABLE.get(name, _OWN_CASE)


@functools.cache
def definition_of(name: str) -> OptimizerDef:
    """The definition for parameters of `SHAPES`."""
    if name in OURS:
        return OURS[name]()
    return OptaxWrapper(TABLE[name].build(param_structs(name)))


@functools.cache
def param_structs(name: str) -> Tree:
    """The parameters as shapes."""
    return structs(SHAPES, case_of(name))


@functools.cache
def optimizer_structs(name: str) -> Optimizer:
    """The optimizer as shapes, without running its `init`."""
    created: Optimizer = jax.eval_shape(definition_of(name).create, param_structs(name))
    return created


def random_params(name: str, seed: int) -> Tree:
    """Parameters."""
    rng = np.random.default_rng(seed)

    def leaf(struct: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.array(rng.standard_normal(struct.shape) + 1.5, struct.dtype)

    return jax.tree.map(leaf, param_structs(name))


def random_bits(tree: Tree, seed: int) -> Tree:
    """Arrays of any bits at all in the place of shapes: NaN, infinities and -0 among them."""
    rng = np.random.default_rng(seed)

    def leaf(struct: jax.ShapeDtypeStruct) -> jax.Array:
        if is_key(struct):
            data = leaf(jax.eval_shape(jax.random.key_data, struct))
            key: jax.Array = jax.random.wrap_key_data(data, impl="threefry2x32")
            return key
        if struct.dtype == bool:
            return jnp.array(rng.integers(0, 2, struct.shape).astype(bool))
        if jnp.issubdtype(struct.dtype, jnp.integer):  # counts are not negative
            return jnp.array(rng.integers(0, 2**31, struct.shape).astype(struct.dtype))
        raw = rng.bytes(int(np.prod(struct.shape)) * struct.dtype.itemsize)
        return jnp.array(np.frombuffer(raw, struct.dtype).reshape(struct.shape))

    return jax.tree.map(leaf, tree)


def bits(tree: Tree) -> list[tuple[Any, ...]]:
    """What two trees have in common if they are equal, to the bit."""

    def of(leaf: Any) -> tuple[Any, ...]:
        kind = (type(leaf) if np.isscalar(leaf) else leaf.dtype, getattr(leaf, "weak_type", False))
        data = jax.random.key_data(leaf) if hasattr(leaf, "dtype") and is_key(leaf) else leaf
        return *kind, np.shape(data), np.asarray(data).tobytes()

    return [of(leaf) for leaf in jax.tree.leaves(tree)]


def training_step(name: str, optimizer: Optimizer, targets: Tree) -> Optimizer:
    """One step towards `targets`, with whatever extra arguments the optimizer wants."""
    case = case_of(name)

    def value_fn(params: Tree) -> jax.Array:
        return loss(params, case.fast(targets))

    value, grads = jax.value_and_grad(value_fn)(case.fast(optimizer.target))
    grads = jax.tree.map(jnp.conj, grads)
    known = {
        "value": value,
        "grad": grads,
        "value_fn": value_fn,
        "obj_fn": value_fn,
        "grad_fn": lambda params, _: jax.grad(value_fn)(params),
        "sum_sq_diff_grads": jax.tree.map(jnp.square, grads),
        "sample_size": 4,
    }
    extras = {extra: known[extra] for extra in case.extras}
    return optimizer.apply_gradient(case.gradients(grads), **extras)
