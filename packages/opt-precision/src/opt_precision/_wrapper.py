"""A transformation whose state or parameters are stored in fewer bits.

`Rounded` for parameters is around `Quantized` for moments, whichever was asked for first.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax

from opt_precision import _select
from opt_precision._codecs import identity
from opt_precision._formats import is_encoded
from opt_precision._init import (
    Codecs,
    First,
    Planned,
    bare_values,
    each_in_a_variable,
    refuse_named,
)
from opt_precision._place import on_host
from opt_precision._states import EXTRA_FIELD, STATE_OF, QuantizedState, is_masked
from opt_precision._step import Results, Step
from opt_precision._update import Arguments
from opt_precision._weights import NEAREST, Weights
from opt_precision.errors import StateError

CHUNK_BYTES: Final = 64 << 20
_ARRAYS: Final = 16  # of float32 and of one block, that are there at once
_LEAF_BYTES: Final = 4096  # for each leaf: keys, and where it begins


class Precise(optax.GradientTransformationExtraArgs):
    """A transformation of this package: Optax's `init` and `update`, and `apply`."""

    @property
    def apply(self) -> Any:
        """Takes and returns parameters: `apply(params, state, grads, **extra_args)`."""
        return self.wrapper.apply

    def temporary_bytes(self, params: Any) -> int:
        """Returns the bytes that a step in place needs besides its arguments, at most.

        For transformations that treat elements by themselves, with parameters and state donated.
        XLA for CPUs needs 4 bytes more for each element of the largest leaf.

        Args:
          params: as one device has them; arrays or `jax.ShapeDtypeStruct`s.
        """
        quantized = taken_apart(self)[1]
        sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(params)]
        chunk = CHUNK_BYTES if quantized is None else quantized.chunk_bytes
        copied = 4 * max(sizes, default=0) if jax.default_backend() == "cpu" else 0
        most: int = 4 * _ARRAYS * min(chunk // 4, sum(sizes)) + _LEAF_BYTES * len(sizes) + copied
        return most

    @property
    def wrapper(self) -> Any:
        """What the functions are methods of."""
        return self.update.__self__  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True, eq=False)
class _Wrapper:
    """What both parts do."""

    tx: optax.GradientTransformationExtraArgs  # the transformation inside

    def update(
        self, updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        """Returns float32 updates and the new state, as Optax's transformations do."""
        return self._step(Arguments(updates, params, extra_args, is_in_place=False), state)

    def apply(self, params: Any, state: Any, grads: Any, **extra_args: Any) -> tuple[Any, Any]:
        """Returns the new parameters and state, computed block by block in place of the old."""
        return self._step(Arguments(grads, params, extra_args, is_in_place=True), state)

    def _step(self, args: Arguments, state: Any) -> tuple[Any, Any]:
        grads, params, bare = bare_values((args.grads, args.params, state))
        bare_args = dataclasses.replace(args, grads=grads, params=params)
        results = Step(self.filled(bare_args, bare)).run()
        new = jax.tree.unflatten(results.tree, results.leaves), self.next_state(bare, results)
        if results.tree == jax.tree.structure(args.grads):
            return new
        given: Any = jax.tree.structure((args.grads, state))
        wrapped: tuple[Any, Any] = jax.tree.unflatten(given, jax.tree.leaves(new))
        return wrapped

    def filled(self, args: Arguments, state: Any) -> Arguments:
        """What a step takes, with this part's state and settings."""
        raise NotImplementedError

    def next_state(self, state: Any, results: Results) -> Any:
        """The state after a step."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class Quantized(_Wrapper):
    """Moments are stored in fewer bits, or on the host."""

    codec: Codecs | None = None  # how moments are stored, for all or by role; `None` as they are
    # Which leaves are moments.
    select: _select.Select = dataclasses.field(default_factory=_select.moments)
    chunk_bytes: int = CHUNK_BYTES  # the float32 bytes of one block of a leaf
    seed: int = 0  # of the noise
    layout: Any = None  # where parameters lie
    on_host: _select.Select | None = None  # which leaves lie on the host; `None` for none

    @property
    def name(self) -> str:
        """The name of the constructor."""
        return "offload_state" if self.codec is None else "quantize_state"

    def first(self, params: Any) -> tuple[First, list[Planned]]:
        """The traced `init`, and what becomes of every leaf."""
        first = First(self.tx, params)
        first.check_order(self.name)
        return first, first.plan(self.codec or identity(), self.select)

    def init(self, params: Any) -> QuantizedState:
        """Returns the state before the first step."""
        first, plan = self.first(params)
        refuse_named(self.name, params, plan)
        state = first.state(plan)
        if self.on_host is not None:
            nodes, tree = jax.tree.flatten(state, is_leaf=is_encoded)
            rows = zip(nodes, first.plan(identity(), self.on_host), strict=True)
            moved = [
                jax.tree.map(on_host, node) if planned.choice.role and planned.aval.shape else node
                for node, planned in rows
            ]
            state = jax.tree.unflatten(tree, moved)
        return QuantizedState(jnp.zeros([], jnp.int32), each_in_a_variable(state))

    def filled(self, args: Arguments, state: Any) -> Arguments:
        """See above."""
        _check_kind(state, QuantizedState)
        return dataclasses.replace(
            args,
            tx=self.tx,
            state=state.inner,
            is_coded=True,
            seed=self.seed,
            steps=(args.steps[0], state.step),
            chunk_bytes=self.chunk_bytes,
            layout=self.layout,
        )

    def next_state(self, state: QuantizedState, results: Results) -> QuantizedState:
        """The state after a step."""
        step: Any = optax.safe_increment(state.step)  # the largest int32 stays what it is
        return QuantizedState(step, results.state)

    def describe_fields(self) -> dict[str, Any]:
        """Returns what the fields mean, as `opt_core.protocols.DescribesFields` asks."""
        return {
            "name": self.name,
            "roles": {"step": "count"},
            "settings": {"seed": self.seed},
            "passes_on": True,
        }


@dataclasses.dataclass(frozen=True, eq=False)
class Rounded(_Wrapper):
    """bfloat16 parameters take small updates."""

    weights: Weights  # how parameters are rounded

    @property
    def name(self) -> str:
        """The name of the constructor."""
        return self.weights.constructor

    @property
    def inside(self) -> Quantized | None:
        """The other part, if moments are stored in fewer bits, too."""
        return self.tx.wrapper if isinstance(self.tx, Precise) else None

    def init(self, params: Any) -> Any:
        """Returns the state before the first step."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if jnp.result_type(leaf) == jnp.float16:
                raise StateError(
                    f"`{self.name}`: {jax.tree_util.keystr(path)} is float16; parameters are "
                    "stored in bfloat16 or float32. Convert them."
                )
        if self.inside is not None:
            inner: Any = self.tx.init(params)
        else:
            first = First(self.tx, params)
            first.check_order(self.name)
            inner = first.state()
        fields = {"inner": inner}
        if self.weights.needs_noise:
            fields["step"] = jnp.zeros([], jnp.int32)
        if self.weights.method in EXTRA_FIELD:
            fields[EXTRA_FIELD[self.weights.method]] = jax.tree.map(self._first_extra, params)
        return STATE_OF[self.weights.method](**fields)

    def _first_extra(self, leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        if not self.weights.is_met_by(leaf.dtype):
            return optax.MaskedNode()
        return self.weights.first_extra(leaf)

    def filled(self, args: Arguments, state: Any) -> Arguments:
        """What a step takes, with this part's state and settings, and the other's."""
        if args.params is None:
            raise StateError(f"`{self.name}` needs the parameters: `update(grads, state, params)`")
        _check_kind(state, STATE_OF[self.weights.method])
        args = dataclasses.replace(
            args,
            extras=self._extras(state, args.params),
            weights=self.weights,
            steps=(getattr(state, "step", 0), 0),
        )
        if self.inside is not None:
            return self.inside.filled(args, state.inner)
        return dataclasses.replace(args, tx=self.tx, state=state.inner)

    def next_state(self, state: Any, results: Results) -> Any:
        """The state after a step."""
        inside = self.inside
        fields = {
            "inner": results.state if inside is None else inside.next_state(state.inner, results)
        }
        if self.weights.needs_noise:
            fields["step"] = optax.safe_increment(state.step)
        if self.weights.method in EXTRA_FIELD:
            field = EXTRA_FIELD[self.weights.method]
            kept = [optax.MaskedNode() if extra is None else extra for extra in results.extras]
            fields[field] = jax.tree.unflatten(results.tree, kept)
        return state._replace(**fields)

    def _extras(self, state: Any, params: Any) -> list[Any]:
        """What is kept besides each parameter; `None` where nothing is."""
        leaves, tree = jax.tree_util.tree_flatten_with_path(params)
        structure: Any = tree
        if self.weights.method == "stochastic":
            return [None] * len(leaves)
        try:
            kept = structure.flatten_up_to(getattr(state, EXTRA_FIELD[self.weights.method]))
        except ValueError:
            raise StateError(
                f"the state of `{self.name}` was made for other parameters than these {len(leaves)}"
            ) from None
        extras = [None if is_masked(one) else one for one in kept]
        for (path, param), extra in zip(leaves, extras, strict=True):
            dtype = jnp.result_type(param)
            if self.weights.is_met_by(dtype) != (extra is not None):
                raise StateError(
                    f"{jax.tree_util.keystr(path)} is {dtype.name}, and the state of "
                    f"`{self.name}` was made for another dtype. Call `init` again, or convert "
                    "the parameters."
                )
        return extras

    def describe_fields(self) -> dict[str, Any]:
        """Returns what the fields mean, as `opt_core.protocols.DescribesFields` asks."""
        roles = {"step": "count", "master": "params_copy", "low": "other", "compensation": "other"}
        return {
            "name": self.name,
            "roles": roles,
            "settings": {"method": self.weights.method, "seed": self.weights.seed},
            "passes_on": True,
        }


def apply(tx: Any, params: Any, state: Any, grads: Any, **extra_args: Any) -> tuple[Any, Any]:
    """Makes one step in place: returns the new parameters and state.

    Under `jit` with parameters and state donated, the temporaries are those of one block of a leaf.

    Args:
      tx: a transformation of this package, or any that has such an `apply`, or only Optax's
        `update`.
      params: the parameters.
      state: the state that belongs to them.
      grads: the gradients.
      **extra_args: for the transformation.

    Examples:
      >>> import opt_precision, optax
      >>> tx = opt_precision.quantize_state(optax.adam(0.1), opt_precision.bfloat16())
      >>> params = {'w': jnp.ones(3)}
      >>> params, state = apply(tx, params, tx.init(params), {'w': jnp.ones(3)})
      >>> params['w'].tolist()
      [0.9, 0.9, 0.9]
    """
    if hasattr(tx, "apply"):
        params_and_state: tuple[Any, Any] = tx.apply(params, state, grads, **extra_args)
        return params_and_state
    with_extra_args = optax.with_extra_args_support  # type: ignore[attr-defined]
    updates, state = with_extra_args(tx).update(grads, state, params, **extra_args)
    return apply_updates(params, updates), state


def apply_updates(params: Any, updates: Any) -> Any:
    """Adds updates to parameters in float32, and rounds once, by bits.

    What `optax.apply_updates` does, also where a compiler would take the rounding for a no-op.

    Args:
      params: the parameters.
      updates: what `update` returned; `None` leaves a parameter as it is.
    """

    def add(param: Any, update: Any) -> Any:
        if param is None or update is None:
            return param
        return NEAREST.place(jnp.asarray(param), None, jnp.asarray(update), None)[0]

    return jax.tree.map(add, params, updates, is_leaf=lambda x: x is None)


def taken_apart(tx: Any) -> tuple[Rounded | None, Quantized | None, Any]:
    """The two parts of a transformation of this package, and the transformation inside."""
    rounded = tx.wrapper if isinstance(tx, Precise) and isinstance(tx.wrapper, Rounded) else None
    tx = tx if rounded is None else rounded.tx
    quantized = tx.wrapper if isinstance(tx, Precise) else None
    return rounded, quantized, tx if quantized is None else quantized.tx


def put_together(tx: Any, quantized: Quantized | None, weights: Weights | None) -> Precise:
    """A transformation with one part or both."""
    if quantized is not None:
        quantized = dataclasses.replace(quantized, tx=tx)
        tx = Precise(quantized.init, quantized.update)
    if weights is not None:
        rounded = Rounded(tx, weights)
        tx = Precise(rounded.init, rounded.update)
    wrapped: Precise = tx
    return wrapped


def _check_kind(state: Any, kind: type) -> None:
    if not isinstance(state, kind):
        raise StateError(
            f"`state` must be a `{kind.__name__}`, found {type(state).__name__}. Mind the order: "
            "`update(grads, state, params)`, `apply(params, state, grads)`."
        )
