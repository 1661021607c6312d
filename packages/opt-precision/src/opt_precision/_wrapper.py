"""A transformation whose state or parameters are stored in fewer bits.

There are two parts, each with a state of its own, and always in this order, whichever was asked for
first: `Rounded` for parameters, around `Quantized` for moments, around the transformation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax

from opt_precision import _select
from opt_precision._arguments import Arguments
from opt_precision._codecs import identity
from opt_precision._formats import is_encoded, is_taken_apart
from opt_precision._init import Codecs, First, Planned
from opt_precision._memory import on_host
from opt_precision._states import EXTRA_FIELD, STATE_OF, QuantizedState
from opt_precision._step import Options, Results, Step
from opt_precision._weights import Weights
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
        made, state = self.step(updates, state, params, extra_args, is_in_place=False)
        return jax.tree.unflatten(jax.tree.structure(updates), made.leaves), state

    def apply(self, params: Any, state: Any, grads: Any, **extra_args: Any) -> tuple[Any, Any]:
        """Returns the new parameters and state, computed block by block in place of the old."""
        made, state = self.step(grads, state, params, extra_args, is_in_place=True)
        return jax.tree.unflatten(jax.tree.structure(params), made.leaves), state

    def step(
        self,
        grads: Any,
        state: Any,
        params: Any,
        extra_args: Mapping[str, Any],
        *,
        is_in_place: bool,
    ) -> tuple[Results, Any]:
        """Returns what a step makes, and the new state."""
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
        first.check_variables(params, plan)
        state = first.state(plan)
        if self.on_host is not None:
            hosted = first.plan(identity(), self.on_host)
            nodes, tree = jax.tree.flatten(state, is_leaf=is_encoded)
            rows = zip(nodes, hosted, strict=True)
            state = jax.tree.unflatten(
                tree,
                [
                    jax.tree.map(on_host, node) if planned.choice.role and planned.shape else node
                    for node, planned in rows
                ],
            )
        return QuantizedState(jnp.zeros([], jnp.int32), state)

    def options(self, weights: Weights) -> Options:
        """What a step needs to know."""
        return Options(self.tx, weights, self.seed, self.chunk_bytes, self.layout)

    def step(
        self,
        grads: Any,
        state: Any,
        params: Any,
        extra_args: Mapping[str, Any],
        *,
        is_in_place: bool,
    ) -> tuple[Results, QuantizedState]:
        """Returns what a step makes, and the new state."""
        _check_kind(state, QuantizedState)
        extras = [None] * len(jax.tree.leaves(grads))
        steps = (state.step, state.step)
        stored = self.stored(state, grads if params is None else params)
        given = Arguments(grads, stored, params, extras, extra_args, steps, is_coded=True)
        made = Step(self.options(Weights("nearest")), given, is_in_place=is_in_place).run()
        return made, QuantizedState(_incremented(state.step), made.state)

    def stored(self, state: QuantizedState, params: Any) -> Any:
        """The inner state; encoded leaves that `flax.nnx.Optimizer` took apart are put together."""
        _check_kind(state, QuantizedState)
        nodes = jax.tree.leaves(state.inner, is_leaf=is_taken_apart)
        if not any(map(is_taken_apart, nodes)):
            return state.inner
        first, plan = self.first(params)
        return first.put_together(plan, state.inner)

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
        return "stochastic_weights" if self.weights.method == "stochastic" else "master_weights"

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

    def step(
        self,
        grads: Any,
        state: Any,
        params: Any,
        extra_args: Mapping[str, Any],
        *,
        is_in_place: bool,
    ) -> tuple[Results, Any]:
        """Returns what a step makes, and the new state."""
        if params is None:
            raise StateError(f"`{self.name}` needs the parameters: `update(grads, state, params)`")
        _check_kind(state, STATE_OF[self.weights.method])
        inside, inner, own_step = self.inside, state.inner, getattr(state, "step", 0)
        if inside is None:
            options, stored, steps = Options(self.tx, self.weights), inner, (own_step, 0)
        else:
            options, stored = inside.options(self.weights), inside.stored(inner, params)
            steps = own_step, inner.step
        extras, is_coded = self._extras(state, params), inside is not None
        given = Arguments(grads, stored, params, extras, extra_args, steps, is_coded)
        made = Step(options, given, is_in_place=is_in_place).run()
        new = made.state
        if inside is not None:
            new = QuantizedState(_incremented(inner.step), new)
        fields = {"inner": new}
        if self.weights.needs_noise:
            fields["step"] = _incremented(own_step)
        if self.weights.method in EXTRA_FIELD:
            kept = [optax.MaskedNode() if extra is None else extra for extra in made.extras]
            tree = jax.tree.structure(params)
            fields[EXTRA_FIELD[self.weights.method]] = jax.tree.unflatten(tree, kept)
        return made, state._replace(**fields)

    def _extras(self, state: Any, params: Any) -> list[Any]:
        """What is kept besides each parameter; `None` where nothing is."""
        leaves, tree = jax.tree_util.tree_flatten_with_path(params)
        structure: Any = tree
        if self.weights.method == "stochastic":
            return [None] * len(leaves)
        try:
            kept: list[Any] = structure.flatten_up_to(
                getattr(state, EXTRA_FIELD[self.weights.method])
            )
        except ValueError:
            kept = [()]
        if not all(isinstance(one, optax.MaskedNode) or hasattr(one, "dtype") for one in kept):
            raise StateError(
                f"the state of `{self.name}` was made for other parameters than these {len(leaves)}"
            )
        extras = [None if isinstance(one, optax.MaskedNode) else one for one in kept]
        for (path, param), extra in zip(leaves, extras, strict=True):
            dtype = jnp.result_type(param)
            if self.weights.is_met_by(dtype) != (extra is not None):
                raise StateError(
                    f"{jax.tree_util.keystr(path)} is {dtype.name}, and the state of "
                    f"`{self.name}` was made for another dtype. Make it anew, or convert the "
                    "parameters."
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
    made: Precise = tx
    return made


def _incremented(count: Any) -> Any:
    return optax.safe_increment(count)  # the largest int32 stays what it is


def _check_kind(state: Any, kind: type) -> None:
    if not isinstance(state, kind):
        raise StateError(
            f"`state` must be a `{kind.__name__}`, found {type(state).__name__}. Mind the order: "
            "`update(grads, state, params)`, `apply(params, state, grads)`."
        )
