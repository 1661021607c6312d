"""Muon: momentum, orthogonalized as whole matrices; the state is Optax's."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import _muon
from optax.contrib._muon import MuonState

from opt_matrix._distribute import Distributed, side_by_side
from opt_matrix._matrices import (
    Dims,
    Matrices,
    all_matrices,
    labelled,
    leaves_by_path,
    path_str,
    require_rules,
)
from opt_matrix._newton_schulz import NewtonSchulz, newton_schulz
from opt_matrix._plan import MAX_GROUP_BYTES, MatrixPlan, plan_matrices
from opt_matrix._transfer import place_like
from opt_matrix.errors import OptionError, PlanError

Scale = Literal["width", "rms", "spectral"]
Orthogonalize = Callable[[jax.Array], jax.Array]


def scale_by_muon(
    *,
    momentum: Any = 0.95,
    nesterov: bool = True,
    orthogonalize: Orthogonalize | None = None,
    scale: Scale = "width",
    matrices: Matrices | None = None,
    mu_dtype: Any = None,
    plan: MatrixPlan | None = None,
    max_group_bytes: int = MAX_GROUP_BYTES,
) -> optax.GradientTransformation:
    r"""Rescales updates as Muon does: their momentum, with singular values near one.

    The momentum lies as the parameters; what is orthogonalized travels as `plan` says, in the dtype
    of the iteration. Without a plan, one is made from the types of parameters on an Explicit mesh;
    any others are computed with leaf by leaf, and the compiler decides.

    Args:
      momentum: decay of the average of gradients.
      nesterov: whether to look a step ahead.
      orthogonalize: maps stacks `[matrices, rows, columns]` to the same; the plan's, or
        `newton_schulz()`, by default. `newton_schulz(dtype=None)` computes as Optax does.
      scale: what updates are multiplied by: `'width'`, `sqrt(max(1, fan_out / fan_in))` as Optax;
        `'rms'`, `0.2 sqrt(max(fan_in, fan_out))` for the learning rates of AdamW; `'spectral'`,
        `sqrt(fan_out / fan_in)`.
      matrices: which dimensions make a matrix; the plan's, or those of two-dimensional leaves. All
        leaves must hold matrices: `muon` sends others elsewhere.
      mu_dtype: of the momentum; that of the parameters by default.
      plan: of `plan_matrices` with the same parameters.
      max_group_bytes: for the plan by types; see `plan_matrices`.

    Returns:
      A transformation whose state is an `optax.contrib.MuonState`.

    Raises:
      OptionError: an argument has no such value, or contradicts the plan.

    References:
      Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon/>`_, 2024
      Liu et al., `Muon is Scalable for LLM Training <https://arxiv.org/abs/2502.16982>`_, 2025

    Examples:
      >>> tx = scale_by_muon(orthogonalize=newton_schulz(dtype=None))
      >>> params = {'w': jnp.eye(2)}
      >>> grads = {'w': jnp.diag(jnp.array([4.0, 4.0]))}
      >>> updates, _ = jax.jit(tx.update)(grads, tx.init(params))
      >>> updates['w'].round(1).tolist()
      [[1.1, 0.0], [0.0, 1.1]]
    """
    if scale not in get_args(Scale):
        raise OptionError(f"`scale` must be one of {list(get_args(Scale))}; got {scale!r}")
    if plan is not None and orthogonalize is None:
        orthogonalize = plan.fn
    elif plan is not None and orthogonalize != plan.fn:
        raise OptionError(
            f"`orthogonalize` is {orthogonalize}, and the plan was made for {plan.fn}"
        )
    compute = newton_schulz() if orthogonalize is None else orthogonalize
    mu_dtype = None if mu_dtype is None else jnp.dtype(mu_dtype)

    def init(params: Any) -> MuonState:
        _dims_of(params, plan, matrices)  # what cannot be updated is better said now
        return MuonState(
            count=jnp.zeros([], jnp.int32),
            mu=optax.tree.zeros_like(params, dtype=mu_dtype),
            ns_coeffs=(
                compute.state_coefficients()
                if isinstance(compute, NewtonSchulz)
                else jnp.zeros((0, 3), jnp.float32)
            ),
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        dims = _dims_of(updates, plan, matrices)
        mu = averaged(updates, state.mu, momentum)
        count = optax.safe_increment(state.count)
        decay = jnp.asarray(momentum)  # perhaps a tracer, which a closure would hide
        scalars = (
            decay,
            jnp.asarray(1 - momentum),
            1 - decay ** optax.safe_increment(count),
            1 - decay**count,
        )

        def direction(scalars: Any, grad: jax.Array, mu: jax.Array) -> Any:
            kept, new, ahead, now = (jnp.asarray(x).astype(mu.dtype) for x in scalars)
            if not nesterov:
                return mu / now
            return kept * (mu / ahead) + new.astype(grad.dtype) * (grad / now.astype(grad.dtype))

        used = plan or _plan_by_types(mu, dims, compute, max_group_bytes)
        if used is None:
            directions = jax.tree.map(functools.partial(direction, scalars), updates, mu)
            orthogonal = _leaf_by_leaf(compute, directions, dims)
        else:
            orthogonal, _ = Distributed(used, compute).apply(
                updates, (), mu, prepare=direction, scalars=scalars
            )

        def scaled(path: Any, x: Any, like: Any) -> Any:
            factor = jnp.asarray(_factor(scale, dims[path_str(path)], x.shape), x.dtype)
            return place_like(factor * x, like)

        new = jax.tree_util.tree_map_with_path(scaled, orthogonal, updates)
        mu = optax.tree.cast(mu, mu_dtype)
        return new, MuonState(count=count, mu=mu, ns_coeffs=state.ns_coeffs)

    return optax.GradientTransformation(init, update)


def muon(
    learning_rate: Any,
    *,
    matrices: Matrices,
    rest: optax.GradientTransformation | None = None,
    weight_decay: Any = 0.0,
    weight_decay_mask: Any = None,
    momentum: Any = 0.95,
    nesterov: bool = True,
    orthogonalize: Orthogonalize | None = None,
    scale: Scale = "width",
    mu_dtype: Any = None,
    plan: MatrixPlan | None = None,
    max_group_bytes: int = MAX_GROUP_BYTES,
) -> optax.GradientTransformationExtraArgs:
    """Muon for the matrices, another optimizer for the rest.

    The state has the structure of `optax.contrib.muon`'s where `rest` is an AdamW with as many
    parts: checkpoints of the one go on with the other.

    Args:
      learning_rate: a number or a schedule; of the rest, too, where `rest` is not given.
      matrices: which leaves hold matrices. One that no rule decides is an error.
      rest: for all others; by default AdamW without decay, as in Optax.
      weight_decay: decoupled, of the matrices.
      weight_decay_mask: as of `optax.add_decayed_weights`.
      momentum: see `scale_by_muon`, as for all that follow.
      nesterov: whether to look a step ahead, in the default of `rest`, too.
      orthogonalize: what is computed with stacks of matrices.
      scale: what updates are multiplied by.
      mu_dtype: of the momentum.
      plan: of `plan_matrices` with the same `matrices`.
      max_group_bytes: for the plan by types.

    Raises:
      UndecidedError: when it meets parameters: `matrices` does not decide a leaf.
      OptionError: an argument has no such value, or contradicts the plan.

    Examples:
      >>> params = {'b': jnp.ones(3), 'w': jnp.ones((2, 3))}
      >>> tx = muon(0.1, matrices=Matrices.by_rank2())
      >>> updates, state = jax.jit(tx.update)(params, tx.init(params), params)
      >>> sorted(state.inner_states)
      ['adam', 'muon']
    """
    require_rules(matrices)
    if rest is None:
        rest = optax.adamw(learning_rate, weight_decay=0.0, mu_dtype=mu_dtype, nesterov=nesterov)
    scaled = scale_by_muon(
        momentum=momentum,
        nesterov=nesterov,
        orthogonalize=orthogonalize,
        scale=scale,
        matrices=matrices,
        mu_dtype=mu_dtype,
        plan=plan,
        max_group_bytes=max_group_bytes,
    )
    # Since 0.2.7 Optax scales by shape in a part of its own: the state has the installed one's.
    shaped = [scale_by_shape()] if hasattr(_muon, "scale_by_shape") else []
    chained = optax.chain(
        scaled,
        *shaped,
        optax.add_decayed_weights(weight_decay, weight_decay_mask),
        _scale_by_learning_rate(learning_rate),
    )

    def labels(params: Any) -> Any:  # an error about overrides finds `muon` by this function
        return labelled(params, matrices, "muon", "adam")

    return optax.partition({"muon": chained, "adam": rest}, labels)


def scale_by_shape() -> optax.GradientTransformation:
    """Keeps the place of Optax's, which scales where `scale_by_muon` already has."""
    # Checkpoints know a transformation by the name of its constructor.

    def init(params: Any) -> optax.EmptyState:
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return updates, state

    return optax.GradientTransformation(init, update)


def _scale_by_learning_rate(rate: Any) -> optax.GradientTransformation:
    if callable(rate):
        return optax.scale_by_schedule(lambda count: -rate(count))
    return optax.scale(-rate)


def averaged(updates: Any, average: Any, decay: Any) -> Any:
    """Returns the running average with one more value in it, as Optax computes it."""
    return jax.tree.map(lambda g, m: (1 - decay) * g + decay * m, updates, average)


def _factor(rule: Scale, dims: Dims, shape: tuple[int, ...]) -> Any:
    """What a leaf is multiplied by; an array where matrices of several widths lie side by side."""
    rows, columns = (math.prod(shape[d] for d in side) for side in (dims.reduction, dims.output))

    def of_matrix(width: int) -> float:
        if rule == "rms":
            return 0.2 * math.sqrt(max(rows, width))
        return math.sqrt(width / rows if rule == "spectral" else max(1.0, width / rows))

    if not dims.split:
        return of_matrix(columns)
    return dims.along_output(np.repeat([*map(of_matrix, dims.split)], dims.split), shape)


def _dims_of(tree: Any, plan: MatrixPlan | None, matrices: Matrices | None) -> dict[str, Dims]:
    """The dimensions of every leaf's matrices; all leaves must have them."""
    if plan is not None:
        decided = plan.dims_of(leaves_by_path(tree))
    else:
        rules = Matrices.by_rank2() if matrices is None else matrices
        # What is masked here may be all that a pattern is for.
        decided = rules.resolve(tree, all_used=False)
    dims = all_matrices("scale_by_muon", decided)
    for path, leaf in leaves_by_path(tree).items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise OptionError(f"{path}: Muon is for real matrices, not {leaf.dtype}; make it rest")
    return dims


def _plan_by_types(
    tree: Any, dims: dict[str, Dims], fn: Orthogonalize, max_group_bytes: int
) -> MatrixPlan | None:
    """A plan for leaves whose types say how they lie; `None` where they do not."""
    shardings = [jax.typeof(leaf).sharding for leaf in jax.tree.leaves(tree)]
    meshes = [sharding.mesh for sharding in shardings if not sharding.mesh.empty]
    if not meshes or not meshes[0].explicit_axes:
        return None
    if meshes[0].auto_axes:
        raise PlanError(
            f"{next(iter(dims))} and others lie on a mesh of Explicit and Auto axes, and types say "
            f"nothing of {meshes[0].auto_axes}: give a `plan`"
        )
    specs = jax.tree.unflatten(jax.tree.structure(tree), [sharding.spec for sharding in shardings])
    decided = Matrices(lambda path, *_: dims[path])
    return plan_matrices(tree, specs, meshes[0], decided, fn=fn, max_group_bytes=max_group_bytes)


def _leaf_by_leaf(fn: Orthogonalize, tree: Any, dims: dict[str, Dims]) -> Any:
    def apply(path: Any, leaf: jax.Array) -> jax.Array:
        own = dims[path_str(path)]
        stack = own.stacked(leaf)
        sides = (math.prod(leaf.shape[d] for d in side) for side in (own.reduction, own.output))
        orthogonal = side_by_side(fn, own.split, stack.reshape(len(stack), *sides))
        return own.unstacked(orthogonal, leaf.shape).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(apply, tree)
