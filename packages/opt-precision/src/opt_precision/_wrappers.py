"""The wrappers: any transformation, with its state or the parameters stored in fewer bits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

import jax
import jax.numpy as jnp
import optax

from opt_precision import _select
from opt_precision._codecs import Codec, Role, identity
from opt_precision._extra_args import incremented, with_extra_args
from opt_precision._formats import is_encoded
from opt_precision._init import Codecs, First, Planned, order_message
from opt_precision._states import (
    EXTRA_CLASS,
    EXTRA_FIELD,
    WEIGHT_STATES,
    QuantizedState,
    StochasticState,
)
from opt_precision._step.arguments import Arguments
from opt_precision._step.memory import KINDS, on_host
from opt_precision._step.step import NEAREST, Options, Results, Step
from opt_precision._weights import Storage, Weights
from opt_precision.errors import OrderError, PrecisionError, StateError

CHUNK_BYTES: Final = 64 << 20
ARRAYS: Final = 16  # of float32 and of one piece, that are there at once
_LEAF_BYTES: Final = 1024  # for each leaf: keys, where it begins, what tells it from others
# XLA on CPUs copies the codes of one leaf: see `opt_precision._step.stream`.
_COPIED: Final = {"float8": 4}
_ROLES: Final = frozenset(get_args(Role))


class Precise(optax.GradientTransformationExtraArgs):
    """A transformation of this package: Optax's `init` and `update`, and `apply`."""

    @property
    def apply(self) -> Any:
        """Takes and returns parameters: `apply(params, state, grads, **extra_args)`."""
        return self.wrapper.apply

    def temporary_bytes(self, params: Any) -> int:
        """Returns the bytes that a step in place needs besides its arguments, at most.

        For transformations that treat elements by themselves, with parameters and state donated.

        Args:
          params: as one device has them; arrays or `jax.ShapeDtypeStruct`s.
        """
        wrapper = self.wrapper
        inside = wrapper if isinstance(wrapper, Quantized) else opened(wrapper.tx)
        sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(params)]
        limit, codecs = CHUNK_BYTES // 4, {identity()}
        if isinstance(inside, Quantized):
            limit, codecs = inside.chunk_bytes // 4, _codecs_of(inside.codec)
        piece = max(limit, math.lcm(*(codec.block or 1 for codec in codecs)))
        copied = max(_COPIED.get(codec.name, 0) for codec in codecs)
        if jax.default_backend() != "cpu":
            copied = 0
        made: int = 4 * ARRAYS * min(piece, sum(sizes)) + _LEAF_BYTES * len(sizes)
        return made + copied * max(sizes, default=0)

    @property
    def wrapper(self) -> Any:
        """What the functions are methods of."""
        return self.update.__self__  # type: ignore[attr-defined]


def opened(tx: Any) -> Any:
    """The wrapper of this package that a transformation is, if it is one."""
    return tx.wrapper if isinstance(tx, Precise) else None


@dataclasses.dataclass(frozen=True, eq=False)
class Quantized:
    """`quantize_state`: moments are stored in fewer bits.

    Attributes:
      tx: the transformation inside.
      codec: how moments are stored, for all or by role.
      select: which leaves are moments.
      chunk_bytes: the float32 bytes of one piece of a leaf.
      seed: of the noise.
      layout: where parameters lie.
      on_host: which leaves lie on the host; `None` for none.
    """

    tx: optax.GradientTransformationExtraArgs
    codec: Codecs
    select: _select.Select
    chunk_bytes: int
    seed: int
    layout: Any
    on_host: _select.Select | None = None

    @property
    def name(self) -> str:
        """The name of the constructor."""
        is_plain = self.on_host is not None and self.codec == identity()
        return "offload_state" if is_plain else "quantize_state"

    def first(self, params: Any) -> tuple[First, list[Planned]]:
        """The traced `init`, and what becomes of every leaf."""
        first = First(self.tx, params)
        first.check_order("quantize_state")
        return first, first.plan(self.codec, self.select)

    def init(self, params: Any) -> QuantizedState:
        """Returns the state before the first step."""
        first, plan = self.first(params)
        state = first.state(plan)
        if self.on_host is not None:
            state = self._offloaded(state, first.plan(identity(), self.on_host))
        return QuantizedState(jnp.zeros([], jnp.int32), state)

    def _offloaded(self, state: Any, plan: list[Planned]) -> Any:
        nodes, tree = jax.tree.flatten(state, is_leaf=is_encoded)
        return jax.tree.unflatten(
            tree,
            [
                jax.tree.map(on_host, node) if planned.choice.role and planned.shape else node
                for node, planned in zip(nodes, plan, strict=True)
            ],
        )

    def options(self, weights: Weights = NEAREST) -> Options:
        """What a step needs to know."""
        return Options(self.tx, weights, self.seed, self.chunk_bytes, self.layout)

    def update(
        self, updates: Any, state: QuantizedState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, QuantizedState]:
        """Returns float32 updates and the new state, as Optax's transformations do."""
        made, state = self._step(updates, state, params, extra_args, is_in_place=False)
        return jax.tree.unflatten(jax.tree.structure(updates), made.leaves), state

    def apply(
        self, params: Any, state: QuantizedState, grads: Any, **extra_args: Any
    ) -> tuple[Any, QuantizedState]:
        """Returns the new parameters and state, computed piece by piece in place of the old."""
        made, state = self._step(grads, state, params, extra_args, is_in_place=True)
        return jax.tree.unflatten(jax.tree.structure(params), made.leaves), state

    def _step(
        self,
        grads: Any,
        state: QuantizedState,
        params: Any,
        extra_args: Mapping[str, Any],
        *,
        is_in_place: bool,
    ) -> tuple[Results, QuantizedState]:
        _check_kind(state, QuantizedState)
        extras = [None] * len(jax.tree.leaves(grads))
        steps = (state.step, state.step)
        given = Arguments(grads, state.inner, params, extras, extra_args, steps, is_coded=True)
        made = Step(self.options(), given, is_in_place=is_in_place).run()
        return made, QuantizedState(incremented(state.step), made.state)

    def describe_fields(self) -> dict[str, Any]:
        """Returns what the fields mean, as `opt_core.protocols.DescribesFields` asks."""
        return {
            "name": self.name,
            "roles": {"step": "count"},
            "settings": {"seed": self.seed},
            "passes_on": True,
        }


@dataclasses.dataclass(frozen=True, eq=False)
class Rounded:
    """`stochastic_weights` and `master_weights`: how bfloat16 parameters take small updates.

    Attributes:
      tx: the transformation inside.
      weights: how parameters are rounded.
    """

    tx: optax.GradientTransformationExtraArgs
    weights: Weights

    @property
    def name(self) -> str:
        """The name of the constructor."""
        return "stochastic_weights" if self.weights.method == "stochastic" else "master_weights"

    @property
    def kind(self) -> Any:
        """The class of its states."""
        return EXTRA_CLASS.get(self.weights.method, StochasticState)

    def init(self, params: Any) -> Any:
        """Returns the state before the first step."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if jnp.result_type(leaf) == jnp.float16:
                raise StateError(
                    f"`{self.name}`: {jax.tree_util.keystr(path)} is float16; parameters are "
                    "stored in bfloat16 or float32. Convert them."
                )
        if isinstance(opened(self.tx), Quantized):
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
        return self.kind(**fields)

    def _first_extra(self, leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        if not self.weights.is_met_by(leaf.dtype):
            return optax.MaskedNode()
        return self.weights.first_extra(leaf)

    def update(
        self, updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        """Returns the float32 updates that `optax.apply_updates` turns into the new parameters."""
        if params is None:
            raise StateError(f"`{self.name}` needs the parameters: `update(grads, state, params)`")
        made, state = self._step(updates, state, params, extra_args, is_in_place=False)
        return jax.tree.unflatten(jax.tree.structure(updates), made.leaves), state

    def apply(self, params: Any, state: Any, grads: Any, **extra_args: Any) -> tuple[Any, Any]:
        """Returns the new parameters and state, computed piece by piece in place of the old."""
        made, state = self._step(grads, state, params, extra_args, is_in_place=True)
        return jax.tree.unflatten(jax.tree.structure(params), made.leaves), state

    def _step(
        self,
        grads: Any,
        state: Any,
        params: Any,
        extra_args: Mapping[str, Any],
        *,
        is_in_place: bool,
    ) -> tuple[Results, Any]:
        _check_kind(state, self.kind)
        inside = opened(self.tx)
        is_quantized = isinstance(inside, Quantized)
        if is_quantized:
            _check_kind(state.inner, QuantizedState)
        options = (
            inside.options(self.weights)
            if is_quantized
            else Options(self.tx, self.weights, chunk_bytes=CHUNK_BYTES)
        )
        own_step = getattr(state, "step", 0)
        steps = (own_step, state.inner.step if is_quantized else 0)
        stored = state.inner.inner if is_quantized else state.inner
        extras = self._extras(state, params)
        given = Arguments(grads, stored, params, extras, extra_args, steps, is_quantized)
        made = Step(options, given, is_in_place=is_in_place).run()
        inner = made.state
        if is_quantized:
            inner = QuantizedState(incremented(state.inner.step), inner)
        fields = {"inner": inner}
        if self.weights.needs_noise:
            fields["step"] = incremented(own_step)
        if self.weights.method in EXTRA_FIELD:
            extra = [optax.MaskedNode() if one is None else one for one in made.extras]
            kept = jax.tree.unflatten(jax.tree.structure(params), extra)
            fields[EXTRA_FIELD[self.weights.method]] = kept
        return made, dataclasses.replace(state, **fields)

    def _extras(self, state: Any, params: Any) -> Sequence[Any]:
        leaves, structure = jax.tree_util.tree_flatten_with_path(params)
        if self.weights.method == "stochastic":
            return [None] * len(leaves)
        kept = _kept(structure, getattr(state, EXTRA_FIELD[self.weights.method]))
        if kept is None:
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


def _kept(structure: Any, tree: Any) -> list[Any] | None:
    """What is kept besides each parameter, or a marker; `None` where parameters are others."""
    try:
        found: list[Any] = structure.flatten_up_to(tree)
    except ValueError:
        return None
    is_marker = [isinstance(one, optax.MaskedNode) or hasattr(one, "dtype") for one in found]
    return found if all(is_marker) else None


def quantize_state(
    tx: Any,
    codec: Codecs,
    select: _select.Select | None = None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    seed: int = 0,
    layout: Any = None,
) -> Precise:
    """Stores the moments of any transformation in fewer bits.

    The update is computed in float32, piece by piece, in the place of what is stored: use
    `opt_precision.apply` and donate parameters and state. Moments are recognised by what they are,
    and everything else is kept as it is: `explain_precision` says what became of each leaf.

    Args:
      tx: an Optax transformation, or anything with its `init` and `update`.
      codec: how moments are stored: `bfloat16()`, `dynamic8()`, ...; or a mapping with a codec for
        some of the roles `'moment'`, `'slow_moment'`, `'second_moment'`.
      select: which leaves are moments: `moments()`, `by_field(...)`, `by_path(...)`.
      chunk_bytes: the float32 bytes of one piece of a leaf; temporaries are a few times as much.
      seed: of the noise in stochastic rounding, which depends on it, the number of the step, the
        path of the leaf and the index of the element, and on nothing else.
      layout: where parameters lie: a tree like them of `NamedSharding`s, or an
        `opt_partition.Layout`. Needed on a mesh of Auto axes, which do not show while a step is
        traced; otherwise leaves are not cut into pieces there.

    Returns:
      A transformation with `init`, `update` and `apply`; the state is a `QuantizedState`.

    Raises:
      OrderError: `tx` is a wrapper that belongs around this one.
      SelectionError: a selection names what there is not (raised by `init`).

    Examples:
      >>> import opt_precision
      >>> tx = quantize_state(optax.adamw(1e-3), codec=opt_precision.dynamic8())
      >>> state = tx.init({'w': jnp.ones((64, 256), jnp.bfloat16)})
      >>> sum(leaf.nbytes for leaf in jax.tree.leaves(state.inner[0].nu))
      16640
    """
    inner = _checked(tx)
    wrapper = opened(inner)
    host = None
    if isinstance(wrapper, Quantized) and wrapper.name == "offload_state":
        inner, host = wrapper.tx, wrapper.on_host
        layout = wrapper.layout if layout is None else layout
    elif wrapper is not None:
        raise OrderError(order_message("quantize_state", wrapper.name))
    if type(tx).__name__ == "MultiSteps":
        raise OrderError(order_message("quantize_state", "MultiSteps"))
    if chunk_bytes < 4:
        raise PrecisionError(f"`chunk_bytes` must be at least 4, found {chunk_bytes}")
    made = _select.checked(_select.moments() if select is None else select)
    size = int(chunk_bytes)
    wrapped = Quantized(inner, checked_codec(codec), made, size, int(seed), layout, host)
    return Precise(wrapped.init, wrapped.update)  # type: ignore[arg-type]


def offload_state(
    tx: Any,
    select: _select.Select | None = None,
    memory_kind: str = "pinned_host",
    *,
    chunk_bytes: int = CHUNK_BYTES,
    layout: Any = None,
) -> Precise:
    """Keeps moments in the memory of the host; a compiled step fetches them piece by piece.

    Two pieces are on the device: the next is fetched while one is computed. With `quantize_state`
    around it codes are moved, not float32. Norms and metrics of gradients and updates are as ever.
    Steps that a wrapper around this one skips fetch nothing.

    Args:
      tx: an Optax transformation.
      select: which leaves lie on the host, by default all moments; never counts.
      memory_kind: `'pinned_host'`.
      chunk_bytes: see `quantize_state`; with `quantize_state` around this one, its own counts.
      layout: see `quantize_state`.

    Returns:
      A transformation with `init`, `update` and `apply`; the state is a `QuantizedState`.

    Raises:
      OrderError: `tx` is a wrapper that belongs around this one.
      PrecisionError: another kind of memory, or jax before 0.10.2.
      StateError: the update is not called under `jax.jit`.

    Examples:
      >>> tx = offload_state(optax.adamw(1e-3))
      >>> params = {'w': jnp.ones((64, 256))}
      >>> state = tx.init(params)
      >>> params, state = jax.jit(tx.apply)(params, state, params)
      >>> state.inner[0].mu['w'].sharding.memory_kind, params['w'].sharding.memory_kind
      ('pinned_host', 'device')
    """
    inner = _checked(tx)
    if (wrapper := opened(inner)) is not None:
        raise OrderError(order_message("offload_state", wrapper.name))
    if type(tx).__name__ == "MultiSteps":
        raise OrderError(order_message("offload_state", "MultiSteps"))
    if jax.__version_info__ < (0, 10, 2):
        raise PrecisionError(
            "`offload_state` needs jax 0.10.2 or newer: programs compiled by earlier versions "
            f"return the state in device memory; found jax {jax.__version__}"
        )
    if memory_kind not in KINDS:
        raise PrecisionError(f"`memory_kind` must be one of {KINDS}, found {memory_kind!r}")
    if chunk_bytes < 4:
        raise PrecisionError(f"`chunk_bytes` must be at least 4, found {chunk_bytes}")
    host = _select.checked(_select.moments() if select is None else select)
    wrapped = Quantized(
        inner, identity(), _select.moments(), int(chunk_bytes), 0, layout, on_host=host
    )
    return Precise(wrapped.init, wrapped.update)  # type: ignore[arg-type]


def stochastic_weights(tx: Any, *, seed: int = 0) -> Precise:
    """Rounds bfloat16 parameters stochastically: small updates arrive, on average.

    The update is computed in float32, and nothing is kept besides the parameters. Good for the
    learning rates of pre-training; at 1e-5 and below prefer `master_weights`.

    Args:
      tx: an Optax transformation, or `quantize_state(...)` of one. Nothing around this may multiply
        updates: what it returns is the difference to the rounded parameter.
      seed: of the noise, see `quantize_state`.

    Returns:
      A transformation with `init`, `update` and `apply`; the state is a `StochasticState`.

    Raises:
      OrderError: parameters are rounded inside of `tx` already.

    Examples:
      >>> tx = stochastic_weights(optax.sgd(1e-5))
      >>> params = {'w': jnp.ones(100_000, jnp.bfloat16)}
      >>> params, state = tx.apply(params, tx.init(params), {'w': -jnp.ones(100_000)})
      >>> 1.0 < float(params['w'].astype(jnp.float32).mean()) < 1.00002
      True
    """
    return _rounded(tx, Weights("stochastic", int(seed)))


def master_weights(tx: Any, *, storage: Storage = "f32", seed: int = 0) -> Precise:
    """Keeps what rounding takes from bfloat16 parameters, so that no update is lost.

    Args:
      tx: an Optax transformation, or `quantize_state(...)` of one. Nothing around this may multiply
        updates.
      storage: what is kept besides each parameter. `'f32'`: a float32 copy, 4 bytes.
        `'remainder'`: the other 16 bits of it, 2 bytes; the same numbers, bit for bit. `'kahan'`:
        what rounding took from the last updates, in bfloat16, 2 bytes; not exact, but parameters
        may be edited without telling the state.
      seed: of the noise by which the compensation of `'kahan'` is rounded, see `quantize_state`.

    Returns:
      A transformation with `init`, `update` and `apply`; the state is a `MasterState`, a
      `RemainderState` or a `KahanState`.

    Raises:
      OrderError: parameters are rounded inside of `tx` already.

    Examples:
      >>> import opt_precision
      >>> tx = master_weights(optax.sgd(1e-3), storage='remainder')
      >>> params = {'w': jnp.ones(4, jnp.bfloat16)}
      >>> state = tx.init(params)
      >>> for _ in range(3):
      ...   params, state = tx.apply(params, state, {'w': jnp.ones(4)})
      >>> params['w'][0].item(), opt_precision.master_of(state, params)['w'][0].item()
      (0.99609375, 0.997)
    """
    if storage not in get_args(Storage):
        raise PrecisionError(f"`storage` must be one of {get_args(Storage)}, found {storage!r}")
    return _rounded(tx, Weights(storage, int(seed)))


def _rounded(tx: Any, weights: Weights) -> Precise:
    inner = _checked(tx)
    wrapped = Rounded(inner, weights)
    if isinstance(inside := opened(inner), Rounded):
        raise OrderError(order_message(wrapped.name, inside.name))
    return Precise(wrapped.init, wrapped.update)


def _checked(tx: Any) -> optax.GradientTransformationExtraArgs:
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        advice = (
            "Use its `with_precision(opt_precision.Precision(...))`."
            if hasattr(tx, "with_precision")
            else "Give an optimizer, e.g. `optax.adamw(1e-3)`."
        )
        raise TypeError(
            "`tx` must be a gradient transformation, with `init` and `update`, found "
            f"{tx!r}. {advice}"
        )
    return tx if isinstance(tx, Precise) else with_extra_args(tx)


def checked_codec(codec: Any) -> Codecs:
    """A codec, or one for some of the roles."""
    if isinstance(codec, Codec):
        return codec
    if codec == {}:
        raise PrecisionError(f"`codec` is empty; the roles are {sorted(_ROLES)}")
    if isinstance(codec, Mapping) and all(isinstance(one, Codec) for one in codec.values()):
        if unknown := sorted(codec.keys() - _ROLES):
            raise PrecisionError(f"`codec` has {unknown}; the roles are {sorted(_ROLES)}")
        return {role: codec.get(role, identity()) for role in codec}
    raise TypeError(
        "`codec` must be a codec such as `opt_precision.dynamic8()`, or a mapping from roles to "
        f"codecs, found {codec!r}"
    )


def _codecs_of(codec: Codecs) -> set[Codec]:
    return {codec} if isinstance(codec, Codec) else set(codec.values())


def _check_kind(state: Any, kind: type) -> None:
    if not isinstance(state, kind):
        raise StateError(
            f"`state` must be a `{kind.__name__}`, found {type(state).__name__}. Mind the order: "
            "`update(grads, state, params)`, `apply(params, state, grads)`."
        )


__all__ = [
    "WEIGHT_STATES",
    "Precise",
    "checked_codec",
    "master_weights",
    "offload_state",
    "quantize_state",
    "stochastic_weights",
]
