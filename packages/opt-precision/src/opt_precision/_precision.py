"""How parameters and state are stored, as one value; and short names for its parts.

They combine in any order: each adds its part to a transformation that has others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias, get_args

import jax
import optax

from opt_precision import _select
from opt_precision._codecs import ROLES, Codec, Codecs, Role
from opt_precision._init import order_message
from opt_precision._select import CHUNK_BYTES, Moments
from opt_precision._weights import NEAREST, Storage, Weights
from opt_precision._wrapper import Precise, Wrapper
from opt_precision.errors import OrderError, PrecisionError

Rounding: TypeAlias = Literal["stochastic"] | Storage
_ROUNDINGS: Final = ("stochastic", *get_args(Storage))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """How parameters and state are stored; calling it wraps a transformation.

    A value: two with the same settings are equal, and `str` is short enough for a table.

    Attributes:
      weights: `'stochastic'` for `stochastic_weights`, `'f32'`, `'remainder'`, `'remainder8'` or
        `'kahan'` for `master_weights`; `None` leaves parameters to Optax.
      state: the codec of moments, or one for each role; `None` leaves the state as it is.
      select: which leaves are moments, see `quantize_state`.
      offload: whether moments lie in the memory of the host, by `offload_state`.
      seed: of the noise of both.
      chunk_bytes: see `quantize_state`.
      layout: see `quantize_state`; of the parameters of the transformation.

    Raises:
      PrecisionError: `weights` is none of these, or there is nothing to be done.
      TypeError: `state` is no codec.

    Examples:
      >>> import optax
      >>> from opt_precision import dynamic8
      >>> precision = Precision(weights='stochastic', state=dynamic8())
      >>> print(precision)
      stochastic weights, dynamic8 state
      >>> tx = precision(optax.adamw(1e-3))
    """

    weights: Rounding | None = None
    # No mapping can be hashed, nor a layout.
    state: Codec | Mapping[Role, Codec] | None = dataclasses.field(default=None, hash=False)
    select: _select.Select | None = None
    offload: bool = False
    seed: int = 0
    chunk_bytes: int = CHUNK_BYTES
    layout: Any = dataclasses.field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.chunk_bytes < 4:
            raise PrecisionError(f"`chunk_bytes` must be at least 4, found {self.chunk_bytes}")
        if not (self.select is None or callable(self.select)):
            raise TypeError(
                "`select` must be `moments()`, `by_field(...)` or `by_path(...)`, found "
                f"{self.select!r}"
            )
        if self.offload and jax.__version_info__ < (0, 10, 2):
            raise PrecisionError(
                "`offload_state` needs jax 0.10.2 or newer: programs compiled by earlier versions "
                f"return the state in device memory; found jax {jax.__version__}"
            )
        if self.weights not in (None, *_ROUNDINGS):
            raise PrecisionError(f"`weights` must be one of {_ROUNDINGS}, found {self.weights!r}")
        if self.state is not None:
            _check_codec(self.state)
        elif not self.offload:
            if self.weights is None:
                raise PrecisionError(
                    "give `weights`, `state` or `offload`; without them nothing changes"
                )
            if self.select is not None or self.layout is not None:
                raise PrecisionError("`select` and `layout` are about moments; give `state`")

    def __call__(self, tx: Any) -> Precise:
        """Returns a transformation, wrapped; one that is wrapped already gets the rest, too.

        Args:
          tx: an Optax transformation, or one of this package.

        Raises:
          OrderError: parameters are rounded, or moments encoded or moved, twice.
        """
        wrapper = _wrapper_of(tx)
        weights, moments = wrapper.weights, wrapper.moments
        if self.weights is not None:
            new = Weights(self.weights, self.seed)
            if weights != NEAREST:
                raise OrderError(order_message(new.constructor, weights.constructor))
            weights = new
        if self.state is not None or self.offload:
            moments = self._joined(Moments() if moments is None else moments)
            if type(tx).__name__ == "MultiSteps":
                name = "offload_state" if self.state is None else "quantize_state"
                raise OrderError(order_message(name, "MultiSteps"))
        wrapper = Wrapper(wrapper.tx, moments, weights)
        return Precise(wrapper.init, wrapper.update)

    def _joined(self, before: Moments) -> Moments:
        """What is done with moments: this, besides what was done before."""
        select = _select.moments() if self.select is None else self.select
        changes: dict[str, Any] = {"chunk_bytes": min(self.chunk_bytes, before.chunk_bytes)}
        if self.state is not None:
            if before.codec is not None:
                raise OrderError(order_message("quantize_state", "quantize_state"))
            changes |= {"codec": self.state, "select": select, "seed": self.seed}
        if self.offload:
            if before.on_host is not None:
                raise OrderError(order_message("offload_state", "offload_state"))
            changes["on_host"] = select
        if self.layout is not None:
            changes["layout"] = self.layout
        return dataclasses.replace(before, **changes)

    def __str__(self) -> str:
        parts = [f"{self.weights} weights"] if self.weights else []
        if isinstance(self.state, Codec):
            parts.append(f"{self.state} state")
        elif self.state is not None:
            parts += [f"{codec} {role}" for role, codec in sorted(self.state.items())]
        if self.offload:
            parts.append("moments on the host")
        if self.seed:
            parts.append(f"seed {self.seed}")
        return ", ".join(parts)


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

    The update is computed in float32, block by block, in the place of what is stored: use
    `opt_precision.apply` and donate parameters and state. Moments are recognised by what they are,
    and everything else is kept as it is: `explain_precision` says what became of each leaf.

    Args:
      tx: an Optax transformation, or anything with its `init` and `update`.
      codec: how moments are stored: `bfloat16()`, `dynamic8()`, ...; or a mapping with a codec for
        some of the roles `'moment'`, `'slow_moment'`, `'second_moment'`.
      select: which leaves are moments: `moments()`, `by_field(...)`, `by_path(...)`.
      chunk_bytes: the float32 bytes of one block of a leaf; temporaries are a few times as much.
      seed: of the noise in stochastic rounding, which depends on it, the number of the step, the
        path of the leaf and the index of the element, and on nothing else.
      layout: where parameters lie: a tree like them of `NamedSharding`s, or an
        `opt_partition.Layout`. Needed on a mesh of Auto axes, which do not show while a step is
        traced; otherwise leaves are not cut into blocks there.

    Returns:
      A transformation with `init`, `update` and `apply`; the state is a `PrecisionState`.

    Raises:
      OrderError: moments of `tx` are encoded already, or it is a window such as `MultiSteps`.
      SelectionError: a selection names what there is not (raised by `init`).

    Examples:
      >>> import jax, jax.numpy as jnp, opt_precision, optax
      >>> tx = quantize_state(optax.adamw(1e-3), codec=opt_precision.dynamic8())
      >>> state = tx.init({'w': jnp.ones((64, 256), jnp.bfloat16)})
      >>> sum(leaf.nbytes for leaf in jax.tree.leaves(state.inner[0].nu))
      16640
    """
    _check_codec(codec)
    return Precision(
        state=codec,
        select=select,
        chunk_bytes=int(chunk_bytes),
        seed=int(seed),
        layout=layout,
    )(tx)


def offload_state(
    tx: Any,
    select: _select.Select | None = None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    layout: Any = None,
) -> Precise:
    """Keeps moments in the memory of the host; a compiled step fetches them block by block.

    Two blocks are on the device: the next is fetched while one is computed. With `quantize_state`
    codes are moved, not float32. Norms and metrics of gradients and updates are as ever.
    Steps that a wrapper around this one skips fetch nothing.

    Args:
      tx: an Optax transformation.
      select: which leaves lie on the host, by default all moments; never counts.
      chunk_bytes: see `quantize_state`; the smaller one counts if both have one.
      layout: see `quantize_state`.

    Returns:
      A transformation with `init`, `update` and `apply`; the state is a `PrecisionState`.

    Raises:
      OrderError: moments of `tx` lie on the host already, or it is a window.
      PrecisionError: jax before 0.10.2.
      StateError: the update is not called under `jax.jit`.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> tx = offload_state(optax.adamw(1e-3))
      >>> params = {'w': jnp.ones((64, 256))}
      >>> state = tx.init(params)
      >>> params, state = jax.jit(tx.apply)(params, state, params)
      >>> state.inner[0].mu['w'].sharding.memory_kind, params['w'].sharding.memory_kind
      ('pinned_host', 'device')
    """
    return Precision(offload=True, select=select, chunk_bytes=int(chunk_bytes), layout=layout)(tx)


def stochastic_weights(tx: Any, *, seed: int = 0) -> Precise:
    """Rounds bfloat16 parameters stochastically: small updates arrive, on average.

    The update is computed in float32, and nothing is kept besides the parameters. Good for the
    learning rates of pre-training; at 1e-5 and below prefer `master_weights`. The transformation
    sees parameters in float32, so its moments are float32 too: 10 bytes per parameter with AdamW,
    where plain Optax has bfloat16 moments and 6. For 6 with moments that come down again wrap
    `quantize_state(tx, bfloat16())`, for 4.03 `quantize_state(tx, dynamic8())`.

    Args:
      tx: an Optax transformation, or one of this package. Nothing around this may multiply
        updates: what it returns is the difference to the rounded parameter.
      seed: of the noise, see `quantize_state`.

    Returns:
      A transformation with `init`, `update` and `apply`; the state is a `PrecisionState`.

    Raises:
      OrderError: parameters are rounded inside of `tx` already.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> tx = stochastic_weights(optax.sgd(1e-5))
      >>> params = {'w': jnp.ones(100_000, jnp.bfloat16)}
      >>> params, state = tx.apply(params, tx.init(params), {'w': -jnp.ones(100_000)})
      >>> 1.0 < float(params['w'].astype(jnp.float32).mean()) < 1.00002
      True
    """
    return Precision(weights="stochastic", seed=int(seed))(tx)


def master_weights(tx: Any, *, storage: Storage = "f32", seed: int = 0) -> Precise:
    """Keeps what rounding takes from bfloat16 parameters, so that no update is lost.

    Args:
      tx: an Optax transformation, or one of this package. Nothing around this may multiply
        updates.
      storage: what is kept besides each parameter. `'f32'`: a float32 copy, 4 bytes.
        `'remainder'`: the other 16 bits of it, 2 bytes; the same numbers, bit for bit.
        `'remainder8'`: 8 more bits, 1 byte; the master has 24 bits and is rounded to them
        stochastically. `'kahan'`: what rounding took from the last updates, in bfloat16, 2 bytes;
        not exact, but parameters may be edited without telling the state.
      seed: of the noise of `'remainder8'` and `'kahan'`, see `quantize_state`.

    Returns:
      A transformation with `init`, `update` and `apply`; the state is a `PrecisionState`.

    Raises:
      OrderError: parameters are rounded inside of `tx` already.

    Examples:
      >>> import jax.numpy as jnp, opt_precision, optax
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
    return Precision(weights=storage, seed=int(seed))(tx)


def _wrapper_of(tx: Any) -> Wrapper:
    """The wrapper that a transformation is, or one that changes nothing."""
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
    if isinstance(tx, Precise):
        return tx.wrapper
    return Wrapper(optax.with_extra_args_support(tx), None, NEAREST)  # type: ignore[attr-defined]


def _check_codec(codec: Any) -> None:
    """Raises unless it is a codec, or a mapping with one for some of the roles."""
    if isinstance(codec, Codec):
        return
    if codec == {}:
        raise PrecisionError(f"`codec` is empty; the roles are {sorted(ROLES)}")
    if not isinstance(codec, Mapping) or not all(isinstance(x, Codec) for x in codec.values()):
        raise TypeError(
            "`codec` must be a codec such as `opt_precision.dynamic8()`, or a mapping from roles "
            f"to codecs, found {codec!r}"
        )
    if unknown := sorted(codec.keys() - ROLES):
        raise PrecisionError(f"`codec` has {unknown}; the roles are {sorted(ROLES)}")
