"""The first state: zeros are made as codes of zeros, never encoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import Var
from jax.sharding import NamedSharding

from opt_precision._codecs import Codec, Codecs
from opt_precision._formats import (
    Encoded,
    Format,
    constant_codes,
    encode,
    is_encoded,
    scale_shape,
)
from opt_precision._place import block_spec, explicit_sharding, on_host, padded
from opt_precision._program import Atom, Program
from opt_precision._select import Candidate, Choice, KeyPath, Select, find_mirrors, path_str
from opt_precision._states import is_state
from opt_precision._update import as_array, wide
from opt_precision.errors import OrderError, PrecisionError

_FILLS: Final = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshard"})
_WINDOWS: Final = {
    optax.MultiStepsState: "MultiSteps",
    optax.ApplyIfFiniteState: "apply_if_finite",
}


class Planned(NamedTuple):
    """What is to become of one leaf of a state."""

    path: KeyPath  # of the leaf, in the state of the inner transformation
    aval: Any  # its type
    mirror: Candidate | None  # the parameter that it mirrors, if it may be a moment
    choice: Choice  # its role, or the reason to leave it as it is
    format: Format | None = None  # how it is stored; `None` as it is


class First:
    """The traced `init` of a transformation."""

    def __init__(self, tx: Any, params: Any) -> None:
        keyed, tree = jax.tree_util.tree_flatten_with_path(params)
        self._params = [as_array(leaf) for _, leaf in keyed]
        closed, self._state = jax.make_jaxpr(
            lambda flat: tx.init(jax.tree.unflatten(tree, flat)), return_shape=True
        )(list(map(wide, self._params)))
        self._program = Program(closed)
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(self._state)
        mirrors = find_mirrors(
            [(path, tuple(p.shape)) for (path, _), p in zip(keyed, self._params, strict=True)],
            self._state,
            [(path, tuple(leaf.shape)) for path, leaf in leaves],
        )
        self.leaves: list[Planned] = []
        for (path, leaf), mirror in zip(leaves, mirrors, strict=True):
            is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
            reason = "mirrors no parameter" if mirror is None else "not of floats"
            found = mirror if is_float else None
            self.leaves.append(Planned(path, leaf, found, Choice(None, reason)))

    def plan(self, codecs: Codecs, select: Select) -> list[Planned]:
        """What is to become of every leaf."""
        chosen = iter(select([leaf.mirror for leaf in self.leaves if leaf.mirror is not None]))
        return [
            leaf if leaf.mirror is None else _planned(leaf, next(chosen), codecs)
            for leaf in self.leaves
        ]

    def state(self, plan: Sequence[Planned] | None = None) -> Any:
        """The state; its encoded leaves are made without the leaves themselves where they can."""
        program, leaves = self._program, []
        params = [param.astype(wide(param).dtype) for param in self._params]
        values: dict[Any, Any] = {
            **dict(zip(program.arguments, params, strict=True)),
            **program.consts,
        }
        for atom, planned in zip(program.outs, plan or self.leaves, strict=True):
            form, aval, constant = planned.format, planned.aval, _constant_of(program, atom)
            if constant is None:
                made = program.evaluate(program.part([atom]), values.__getitem__)
                leaf = {**values, **made}[atom]
                new = _strong(leaf) if form is None else Encoded(*encode(form, leaf, None), form)
            elif planned.mirror is None:
                new = jnp.full(aval.shape, constant, aval.dtype)
            else:
                # As the parameter lies, like Optax's; eagerly, the program alone would not say so.
                param = self._params[planned.mirror.param]
                new = (
                    jnp.full_like(param, constant, dtype=aval.dtype)
                    if form is None
                    else _constant(form, param, constant)
                )
            leaves.append(new)
        return jax.tree.unflatten(self._tree, leaves)

    def check_order(self, name: str) -> None:
        """Raises if the state holds that of a wrapper that cannot be inside of this one."""
        is_of_weights = name in ("stochastic_weights", "master_weights")

        def inner(node: Any) -> str | None:
            if is_state(node):
                if node.kept is not None:
                    return node.weights.constructor
                return None if is_of_weights else "quantize_state"
            return None if is_of_weights else _WINDOWS.get(type(node))

        for node in jax.tree.leaves(self._state, is_leaf=lambda node: inner(node) is not None):
            if (found := inner(node)) is not None:
                raise OrderError(order_message(name, found))


def hosted(state: Any, plan: Sequence[Planned]) -> Any:
    """A state with leaves that have a role in the memory of the host."""
    nodes, tree = jax.tree.flatten(state, is_leaf=is_encoded)
    moved = [
        jax.tree.map(on_host, node) if planned.choice.role and planned.aval.shape else node
        for node, planned in zip(nodes, plan, strict=True)
    ]
    return jax.tree.unflatten(tree, moved)


def _planned(leaf: Planned, choice: Choice, codecs: Codecs) -> Planned:
    """The plan for a leaf of which a selection says what it is."""
    if choice.role is None:
        return leaf._replace(choice=choice)
    codec = codecs if isinstance(codecs, Codec) else codecs.get(choice.role)
    form: Format | str = "no codec for its role"
    if codec is not None:
        form = codec.form(choice.role, leaf.aval.shape, leaf.aval.dtype)
    if isinstance(form, Format):
        return leaf._replace(choice=choice, format=form)
    return leaf._replace(choice=choice._replace(reason=form))


def order_message(outer: str, inner: str) -> str:
    """Why one wrapper cannot be around another, and what to write instead."""
    if outer == inner:
        return f"`{outer}` is there twice: keep one of them."
    if inner in ("MultiSteps", "apply_if_finite"):
        return (
            f"`{outer}` is around `{inner}`: it would encode the moments again in steps that do "
            f"not update them, and an accumulator is not a moment. Write `{inner}({outer}(...))`."
        )
    if outer in ("quantize_state", "offload_state"):
        return (
            f"`{outer}` is around `{inner}`, which is in a part of the transformation: give both "
            f"the same transformation. Write `{inner}({outer}(...))`."
        )
    return f"`{outer}` is around `{inner}`: parameters can be rounded once only. Keep one of them."


def each_in_a_variable(state: Any) -> Any:
    """Codes and scales in variables of their own, as the names of dimensions are."""
    return jax.tree.map(_apart, state, is_leaf=_is_variable)


def bare_values(tree: Any) -> Any:
    """The values of variables in their place, as for the leaves of an `nnx.State`."""
    return jax.tree.map(
        lambda node: node.get_value() if _is_variable(node) else node, tree, is_leaf=_is_variable
    )


def refuse_named(name: str, params: Any, plan: Sequence[Planned]) -> None:
    """Raises for scales that Haliax would cut as it does the parameter that they belong to."""
    devices = jax.sharding.get_abstract_mesh().size
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_named):
        if devices > 1 and _is_named(node) and any(p.format and p.format.block for p in plan):
            raise PrecisionError(
                f"`{name}`: {path_str(path)} is a `NamedArray`, and there is a mesh of {devices} "
                "devices: Haliax would cut scales by the names of the parameter's dimensions. Use "
                f"`for_named_arrays({name}(...))` of `examples/adapters/haliax_axes.py`, which "
                "names the codes alone."
            )


def _is_named(node: Any) -> bool:
    """Whether a node is a `haliax.NamedArray`; Haliax is not needed to know it."""
    return hasattr(node, "array") and hasattr(node, "axes")


def _is_variable(node: Any) -> bool:
    """Whether a node is a `flax.nnx.Variable`; Flax is not needed to know it."""
    return hasattr(node, "get_metadata")


def _apart(node: Any) -> Any:
    if not _is_variable(node) or not is_encoded(leaf := node.get_value()):
        return node
    codes = jax.tree.unflatten(jax.tree.structure(node, is_leaf=is_encoded), [leaf.codes])
    scale = None if leaf.scale is None else type(node)(leaf.scale)
    return Encoded(codes, scale, leaf.format)


def _constant_of(program: Program, atom: Atom) -> Any:
    """The number that an output is filled with; `None` if it is not."""
    filled = program.origin(atom, _FILLS)
    return None if isinstance(filled, Var) else np.asarray(filled.val)[()]


def _strong(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and not getattr(jax.typeof(leaf), "weak_type", False):
        return leaf
    return jnp.asarray(leaf, jnp.result_type(leaf))


def _constant(form: Format, param: jax.Array, value: float) -> Encoded:
    """The codes of an array of one number, where the parameter lies."""
    code, scale = constant_codes(form, value)
    codes = jnp.full_like(param, code, dtype=jnp.uint8 if form.block else jnp.uint16)
    if not form.block:
        return Encoded(lax.bitcast_convert_type(codes, form.codes_dtype), None, form)
    shape = scale_shape(param.shape, form.axis, form.block)
    scales = jnp.full(shape, scale, jnp.float32, device=_scale_sharding(form, param))
    return Encoded(codes, scales, form)


def _scale_sharding(form: Format, param: jax.Array) -> NamedSharding | None:
    """Where scales lie, where it is known where the parameter does."""
    is_traced = isinstance(param, jax.core.Tracer)
    sharding: Any = explicit_sharding(param) if is_traced else param.sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    spec = block_spec(sharding.mesh, padded(sharding.spec, param.ndim), param.shape, [form])
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
