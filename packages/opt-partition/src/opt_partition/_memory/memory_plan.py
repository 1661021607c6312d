"""Planning of the memory per device of a training step, before anything is allocated."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from opt_partition._axes.explain import explain
from opt_partition._axes.param_axes import normalise_param_axes
from opt_partition._axes.rules import DEFAULT_RULES, Rules
from opt_partition._init import StateMaker, params_of
from opt_partition._memory.plan import Kind, MemoryPlan
from opt_partition._memory.rows import RowMaker
from opt_partition._memory.state_fields import state_fields
from opt_partition._mesh.layout import Layout, LeafLayout
from opt_partition._mesh.logical_to_mesh import MemoryKinds, logical_to_mesh
from opt_partition._mesh.rule_table import LogicalAxisRules
from opt_partition._mesh.specs import AnyMesh, named_sizes
from opt_partition._mesh.zero import extended, report_replicated
from opt_partition.errors import AxesError


def memory_plan(
    tx: StateMaker,
    params: Any,
    param_axes: Any,
    rules: LogicalAxisRules,
    mesh: AnyMesh,
    *,
    zero: str | Sequence[str] | None = None,
    zero_level: Literal[1, 2] = 1,
    zero_min_bytes: int = 0,
    grad_dtype: Any = None,
    accumulate: Any = None,
    group_by: Callable[[str], str] | None = None,
    memory_kinds: MemoryKinds = None,
    derivation_rules: Rules = DEFAULT_RULES,
    strict: bool = False,
    on_indivisible: Literal["replicate", "error"] = "replicate",
    on_unknown: Literal["error", "replicate"] = "error",
) -> MemoryPlan:
    """Plans the memory of a training step: parameters, gradients, accumulators, optimizer state.

    Allocates nothing and uses no device: `params` may be `jax.ShapeDtypeStruct`s, and the mesh a
    `jax.sharding.AbstractMesh` of any size. The plan counts, to the byte, the arrays that a step
    takes and returns. It does not include activations, padding added by the layouts of some
    accelerators, or temporary buffers of the compiler.

    Args:
      tx: the transformation, its `init`, a definition or an optimizer; see `explain`.
      params: arrays or `jax.ShapeDtypeStruct`s; `None` for those of an optimizer.
      param_axes: logical axes of each parameter; see `derive_logical_axes`.
      rules: rules from logical names to mesh axes; see `logical_to_mesh`.
      mesh: the mesh.
      zero: mesh axes to shard the optimizer state over; see `extend_over`.
      zero_level: 1 for the state only; 2 for gradients and accumulators too.
      zero_min_bytes: minimum size of the leaves to which `zero` applies.
      grad_dtype: dtype of the gradients; by default, that of each parameter. A real dtype is not
        applied to complex parameters, nor vice versa; a note says so. Gradients of integers take no
        memory (float0).
      accumulate: dtype of additional gradient accumulators, sharded like the gradients, besides any
        in `tx` itself, such as those of `optax.MultiSteps`; `True` for float32, or the gradient's
        dtype if wider.
      group_by: returns the group of a parameter for its path; by default, the first key.
      memory_kinds: memory kinds of the state leaves; see `logical_to_mesh`.
      derivation_rules: `rules` of `explain`.
      strict: whether to raise an error if axes cannot be determined, see `explain`, and instead of
        warning that ZeRO leaves state replicated, see `extend_over`.
      on_indivisible: see `logical_to_mesh`.
      on_unknown: see `logical_to_mesh`.

    Returns:
      The plan. A transformation with a method `temporary_bytes`, from the parameters as a device
      has them, is asked for those.

    Warns:
      ReplicatedWarning: `zero` leaves more than 1 % of all bytes replicated, or its axes have one
        device; once, for all that it applies to. See `extend_over`.

    Raises:
      AxesError: axes, rules and mesh do not match; or, if `strict`, `zero` has one device.
      IndivisibleError: see `logical_to_mesh`; or, if `strict`, `zero` leaves state replicated.
      UndecidedError: see `explain`.
      TypeError: `derivation_rules` is not a `Rules`, or `group_by` does not return a string.
      ValueError: `zero_level` is neither 1 nor 2, or is 2 without `zero`; or `grad_dtype` or
        `accumulate` is not a valid dtype for gradients.

    Examples:
      >>> import optax
      >>> plan = memory_plan(
      ...     optax.adam(1e-3),
      ...     {'wi': jax.ShapeDtypeStruct((1024, 4096), 'float32')},
      ...     {'wi': ('embed', 'mlp')},
      ...     [('mlp', 'model'), ('embed', None)],
      ...     jax.sharding.AbstractMesh((64, 8), ('data', 'model')),
      ...     zero='data',
      ... )
      >>> plan.param_bytes_per_device, plan.state_bytes_per_device
      (2097152, 65540)
      >>> plan.state_fields
      {'ScaleByAdamState.count': 4, 'ScaleByAdamState.mu': 32768, 'ScaleByAdamState.nu': 32768}
      >>> [(row.leaf.path, row.reason) for row in plan.replicated][:1]
      [('wi', "not over data=64: no rule shards 'embed'; no rule uses 'data'")]
    """
    over = _check_zero(zero, zero_level, mesh)
    _check_dtype("grad_dtype", grad_dtype)
    _check_dtype("accumulate", None if isinstance(accumulate, bool) else accumulate)
    if not isinstance(derivation_rules, Rules):
        raise TypeError(
            "`derivation_rules` must be `Rules`, e.g. `DEFAULT_RULES.extend({MyState: rule})`; "
            f"found a {type(derivation_rules).__name__}"
        )
    # Read several times (parameters, state, reasons), so an iterator would be exhausted.
    rules = rules if isinstance(rules, Mapping) else list(rules)
    params = params_of(tx, params)
    explanation = explain(tx, params, param_axes, rules=derivation_rules, strict=strict)
    lay = functools.partial(
        logical_to_mesh,
        rules=rules,
        mesh=mesh,
        on_indivisible=on_indivisible,
        on_unknown=on_unknown,
    )
    extend = functools.partial(_extend, axes=over, min_bytes=zero_min_bytes)

    axes = normalise_param_axes(params, param_axes)
    param_layout = lay(axes, shapes=params)
    grads = _with_dtypes(param_layout, lambda dtype: _grad_dtype(dtype, grad_dtype))
    accumulators = None
    if accumulate is not None and accumulate is not False:
        accumulators = _with_dtypes(grads, lambda dtype: _accumulator_dtype(dtype, accumulate))
    if zero_level == 2:
        grads = extend(grads)
        accumulators = None if accumulators is None else extend(accumulators)
    state = extend(lay(explanation.axes, shapes=explanation.state, memory_kinds=memory_kinds))

    layouts: dict[Kind, Layout | None] = {
        "params": param_layout,
        "grads": grads,
        "accumulators": accumulators,
        "state": state,
    }
    zero_kinds: list[Kind] = ["state"]
    if zero_level == 2:
        zero_kinds += ["grads", "accumulators"]
    if over:
        held = {kind: layout for kind, layout in layouts.items() if layout is not None}
        rest = (layout.bytes_per_device for kind, layout in held.items() if kind not in zero_kinds)
        report_replicated(
            [held[kind] for kind in zero_kinds if kind in held],
            over,
            min_bytes=zero_min_bytes,
            strict=strict,
            beside=sum(rest),
        )
    maker = RowMaker(rules, mesh, dict.fromkeys(zero_kinds, over), group_by or _first_key)
    follow_params = [
        row
        for kind, layout in layouts.items()
        if layout is not None and kind != "state"
        for row in maker.of_params(kind, layout, axes)
    ]
    follow_state = maker.of_state(state, explanation, state_fields(explanation.state, params))
    return MemoryPlan(
        mesh=mesh,
        params=param_layout,
        grads=grads,
        accumulators=accumulators,
        state=state,
        rows=(*follow_params, *follow_state),
        explanation=explanation,
        zero=over,
        zero_level=zero_level,
        temporary_bytes=_temporary_bytes(tx, param_layout),
    )


def _temporary_bytes(tx: Any, params: Layout) -> int | None:
    """What a transformation says of its temporaries, of the parameters as a device has them."""
    tell = getattr(tx, "temporary_bytes", None)
    if not callable(tell):
        return None
    return int(tell([jax.ShapeDtypeStruct(x.shard_shape, x.dtype) for x in _leaves(params)]))


def _leaves(layout: Layout) -> list[LeafLayout]:
    return jax.tree.leaves(layout.leaves, is_leaf=lambda leaf: isinstance(leaf, LeafLayout))


def _check_zero(zero: str | Sequence[str] | None, level: int, mesh: AnyMesh) -> tuple[str, ...]:
    """Returns the mesh axes to extend over."""
    axes = (zero,) if isinstance(zero, str) else tuple(zero or ())
    absent = [axis for axis in axes if axis not in mesh.shape]
    if absent or len(set(axes)) < len(axes):
        raise AxesError(
            "`zero` must be distinct mesh axes: the mesh has "
            f"{named_sizes(mesh, mesh.axis_names)}; found {zero!r}"
        )
    if level not in (1, 2) or (level == 2 and not axes):
        raise ValueError(
            f"`zero_level` must be 1, or 2 together with `zero`; found {level!r} with "
            f"`zero={zero!r}`. Name the mesh axes in `zero`, e.g. 'data'."
        )
    return axes


def _check_dtype(argument: str, asked: Any) -> None:
    """Raises `ValueError` if gradients cannot have a dtype."""
    if asked is not None and not jax.numpy.issubdtype(asked, np.inexact):
        raise ValueError(
            f"`{argument}` must be a floating-point or complex dtype, e.g. 'bfloat16'; found "
            f"{jax.numpy.dtype(asked)}"
        )


def _extend(layout: Layout, axes: tuple[str, ...], min_bytes: int) -> Layout:
    """Returns the layout extended over `axes`, if any."""
    if not axes:
        return layout
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), layout.leaves)
    return extended(layout, shapes, layout.mesh, axes, min_bytes=min_bytes)


def _first_key(path: str) -> str:
    return path.split("/", 1)[0]


def _with_dtypes(layout: Layout, choose: Callable[[Any], tuple[Any, str | None]]) -> Layout:
    """Returns the layout with other dtypes, and notes where a requested dtype is not used."""

    def change(leaf: LeafLayout) -> LeafLayout:
        dtype, note = choose(leaf.dtype)
        notes = leaf.notes if note is None else (*leaf.notes, note)
        return dataclasses.replace(leaf, dtype=dtype, notes=notes)

    return Layout(layout.mesh, jax.tree.map(change, layout.leaves))


def _grad_dtype(dtype: Any, asked: Any) -> tuple[Any, str | None]:
    """Returns the gradient dtype of a parameter of `dtype`, and a note."""
    if not jax.numpy.issubdtype(dtype, np.inexact):
        return jax.dtypes.float0, None
    if asked is None:
        return dtype, None
    asked = jax.numpy.dtype(asked)
    is_complex, to_complex = (
        jax.numpy.issubdtype(kind, np.complexfloating) for kind in (dtype, asked)
    )
    if is_complex != to_complex:
        found = "complex" if to_complex else "real"
        return dtype, f"the gradient keeps {dtype}, as {asked} is {found}"
    return asked, None


def _accumulator_dtype(dtype: Any, asked: Any) -> tuple[Any, str | None]:
    """Returns the accumulator dtype of a gradient of `dtype`, and a note."""
    if asked is True and dtype != jax.dtypes.float0:
        with jax.numpy_dtype_promotion("standard"):
            return jax.numpy.promote_types(dtype, jax.numpy.float32), None
    return (dtype, None) if asked is True else _grad_dtype(dtype, asked)
