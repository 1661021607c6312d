"""The first state: zeros are made as codes of zeros, never encoded."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import Var
from jax.sharding import NamedSharding, PartitionSpec

from opt_precision._arguments import wide
from opt_precision._codecs import Codec, Role
from opt_precision._formats import Encoded, Format, constant_codes, encode, is_taken_apart
from opt_precision._mesh import aligned, axis_names, shards, without
from opt_precision._mirrors import KeyPath, Mirror, find_mirrors, path_str
from opt_precision._program import Atom, Program, feeding_extremes
from opt_precision._select import Candidate, Choice, Select
from opt_precision._states import WEIGHT_STATES, QuantizedState
from opt_precision.errors import OrderError, PrecisionError

Codecs: TypeAlias = Codec | Mapping[Role, Codec]

_FILLS: Final = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshard"})
_WINDOWS: Final = (optax.MultiStepsState, optax.ApplyIfFiniteState)
_NAMES: Final = {
    "QuantizedState": "quantize_state",
    "StochasticState": "stochastic_weights",
    "MasterState": "master_weights",
    "RemainderState": "master_weights(storage='remainder')",
    "Remainder8State": "master_weights(storage='remainder8')",
    "KahanState": "master_weights(storage='kahan')",
    "MultiStepsState": "MultiSteps",
    "ApplyIfFiniteState": "apply_if_finite",
}


class Planned(NamedTuple):
    """What is to become of one leaf of a state."""

    path: KeyPath  # of the leaf, in the state of the inner transformation
    shape: tuple[int, ...]  # of it
    dtype: Any  # of it
    mirror: Mirror | None  # the parameter that it mirrors, if it does
    choice: Choice  # its role, or the reason to leave it as it is
    format: Format | None  # how it is stored; `None` as it is


class First:
    """The traced `init` of a transformation."""

    def __init__(self, tx: Any, params: Any) -> None:
        self._tx = tx
        keyed, self._tree = jax.tree_util.tree_flatten_with_path(params)
        self.params = [
            leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for _, leaf in keyed
        ]
        self.paths: list[KeyPath] = [path for path, _ in keyed]
        made: list[Any] = []

        def init(*flat: Any) -> list[Any]:
            state = tx.init(jax.tree.unflatten(self._tree, flat))
            keyed, tree = jax.tree_util.tree_flatten_with_path(state)
            made[:] = [[path for path, _ in keyed], tree]
            return [leaf for _, leaf in keyed]

        self.program = Program(jax.make_jaxpr(init)(*map(wide, self.params)))
        self.state_paths: list[KeyPath] = made[0]
        self.state_tree = made[1]
        self.skeleton = jax.tree.unflatten(self.state_tree, [0] * len(self.state_paths))

    @property
    def avals(self) -> list[Any]:
        """The types of the leaves of the state."""
        return [atom.aval for atom in self.program.outs]

    @functools.cached_property
    def _mirrors(self) -> list[Mirror | None]:
        shapes = [(path, tuple(p.shape)) for path, p in zip(self.paths, self.params, strict=True)]
        state = [
            (path, tuple(aval.shape))
            for path, aval in zip(self.state_paths, self.avals, strict=True)
        ]
        return find_mirrors(shapes, self.skeleton, state)

    def plan(self, codecs: Codecs, select: Select) -> list[Planned]:
        """What is to become of every leaf."""
        mirrors = self._mirrors
        places = [
            i
            for i, (mirror, aval) in enumerate(zip(mirrors, self.avals, strict=True))
            if mirror is not None and jnp.issubdtype(aval.dtype, jnp.floating)
        ]
        candidates = []
        for i in places:
            mirror = mirrors[i]
            assert mirror is not None
            parameter = path_str(self.paths[mirror.param])
            path = path_str(self.state_paths[i])
            candidates.append(Candidate(path, parameter, mirror.field, mirror.owner))
        chosen = dict(zip(places, select(candidates), strict=True))
        if {choice.role is None for choice in chosen.values()} == {True, False}:
            for i, extreme in self._feeding_extremes().items():
                if i in chosen and chosen[i].role is not None:
                    path = path_str(self.state_paths[extreme])
                    chosen[i] = Choice(None, f"feeds {path}, which would keep errors of rounding")
        return [self._planned(i, mirrors[i], chosen.get(i), codecs) for i in range(len(self.avals))]

    def _feeding_extremes(self) -> dict[int, int]:
        """See `feeding_extremes`; a step checks it again."""
        number, wides = len(self.params), [wide(param) for param in self.params]

        def update(*flat: Any) -> list[Any]:
            state = jax.tree.unflatten(self.state_tree, flat[number:-number])
            trees = [jax.tree.unflatten(self._tree, own) for own in (flat[:number], flat[-number:])]
            return jax.tree.leaves(self._tx.update(trees[0], state, trees[1]))

        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*wides, *self.avals, *wides)]
        try:
            closed = jax.make_jaxpr(update)(*types)
        except Exception:  # an update may need more arguments, or the axes of a mesh
            return {}
        return feeding_extremes(Program(closed), number, len(self.avals))

    def _planned(
        self, i: int, mirror: Mirror | None, choice: Choice | None, codecs: Codecs
    ) -> Planned:
        aval = self.avals[i]
        shape, dtype = tuple(aval.shape), aval.dtype
        form = None
        if choice is None:
            choice = Choice(None, "mirrors no parameter" if mirror is None else "not of floats")
        elif choice.role is not None:
            codec = codecs if isinstance(codecs, Codec) else codecs.get(choice.role)
            found = (
                "no codec for its role" if codec is None else codec.form(choice.role, shape, dtype)
            )
            if isinstance(found, Format):
                form = found
            else:
                choice = choice._replace(reason=found)
        return Planned(self.state_paths[i], shape, dtype, mirror, choice, form)

    def state(self, plan: Sequence[Planned] | None = None) -> Any:
        """The state; its encoded leaves are made without the leaves themselves where they can."""
        program, leaves = self.program, []
        values = dict(zip(program.arguments, map(_wide, self.params), strict=True))
        values |= program.consts
        rows = zip(program.outs, self.avals, self._mirrors, strict=True)
        for i, (atom, aval, mirror) in enumerate(rows):
            form = None if plan is None else plan[i].format
            constant = _constant_of(program, atom)
            is_float = jnp.issubdtype(aval.dtype, jnp.floating)
            if mirror is not None and is_float and constant is not None:
                # As the parameter lies, like Optax's; eagerly, the program alone would not say so.
                param = self.params[mirror.param]
                leaves.append(
                    jnp.full_like(param, constant, dtype=aval.dtype)
                    if form is None
                    else _constant(form, param, constant)
                )
                continue
            if constant is not None and form is None:
                leaves.append(jnp.full(aval.shape, constant, aval.dtype))
                continue
            part = program.part([atom])
            [leaf] = program.evaluate(part, [values[start] for start in part.starts])
            leaves.append(
                _strong(leaf) if form is None else Encoded(*encode(form, leaf, None), form)
            )
        return jax.tree.unflatten(self.state_tree, leaves)

    def check_variables(self, params: Any, plan: Sequence[Planned]) -> None:
        """Raises for scales that `flax.nnx.Optimizer` could not shard as the parameter is."""
        variables = jax.tree.leaves(params, is_leaf=_is_variable)
        if len(variables) != len(self.params) or not all(map(_is_variable, variables)):
            return
        for planned in plan:
            form, mirror = planned.format, planned.mirror
            if form is None or mirror is None or not form.block:
                continue
            metadata = variables[mirror.param].get_metadata()
            mesh = metadata.get("mesh") or jax.sharding.get_abstract_mesh()
            lies = metadata.get("out_sharding") or metadata.get("sharding_names") or ()
            entries = dict(enumerate(getattr(lies, "spec", lies)))
            names = [name for name in axis_names(entries.get(form.axis)) if name in mesh.shape]
            blocks, parts = -(-planned.shape[form.axis] // form.block), shards(mesh, names)
            if blocks % parts:
                raise PrecisionError(
                    f"{path_str(planned.path)} has {blocks} scales along dimension {form.axis}, "
                    f"which `flax.nnx.Optimizer` would cut into {parts} parts as its parameter. "
                    "Use `opt_nnx.Optimizer`, a `block` of which whole ones lie on each device, or "
                    "parameters without metadata: `nnx.as_pure(nnx.state(model))`."
                )

    def put_together(self, plan: Sequence[Planned], state: Any) -> Any:
        """A state whose encoded leaves became mappings from the names of their arrays."""
        nodes = [
            Encoded(node["codes"], node.get("scale"), planned.format)
            if planned.format is not None and is_taken_apart(node)
            else node
            for node, planned in zip(self.state_tree.flatten_up_to(state), plan, strict=True)
        ]
        return jax.tree.unflatten(self.state_tree, nodes)

    def check_order(self, name: str) -> None:
        """Raises if the state holds that of a wrapper that cannot be inside of this one."""
        is_of_weights = name in ("stochastic_weights", "master_weights")
        wrong = WEIGHT_STATES if is_of_weights else (QuantizedState, *WEIGHT_STATES, *_WINDOWS)
        for node in _nodes(self.skeleton):
            if isinstance(node, wrong):
                raise OrderError(order_message(name, _NAMES[type(node).__name__]))


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


def _is_variable(node: Any) -> bool:
    """Whether a node is a `flax.nnx.Variable`; Flax is not needed to know it."""
    return hasattr(node, "get_metadata")


def _nodes(tree: Any) -> Iterator[Any]:
    yield tree
    children = jax.tree_util.tree_flatten(tree, is_leaf=lambda x: x is not tree)[0]
    for child in children:
        if child is not tree:
            yield from _nodes(child)


def _wide(param: jax.Array) -> jax.Array:
    return param.astype(wide(param).dtype)


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
    if code:
        width = jnp.uint16 if form.kind == "bfloat16" else jnp.uint8
        codes = jnp.full_like(param, code, dtype=width)
        if width != form.codes_dtype:
            codes = lax.bitcast_convert_type(codes, form.codes_dtype)
    else:
        codes = jnp.zeros_like(param, dtype=form.codes_dtype)
    shape = form.scale_shape(tuple(param.shape))
    if shape is None:
        return Encoded(codes, None, form)
    return Encoded(
        codes, jnp.full(shape, scale, jnp.float32, device=_scale_sharding(form, param)), form
    )


def _scale_sharding(form: Format, param: jax.Array) -> NamedSharding | None:
    """Where scales lie, where it is known where the parameter does."""
    is_concrete = not isinstance(param, jax.core.Tracer)
    sharding: Any = param.sharding if is_concrete else jax.typeof(param).sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    if not is_concrete and not sharding.mesh.explicit_axes:
        return None
    spec = PartitionSpec(*sharding.spec, *[None] * (param.ndim - len(sharding.spec)))
    if not aligned(sharding.mesh, spec, param.shape, form.axis, form.block):
        spec = without(spec, form.axis)
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
