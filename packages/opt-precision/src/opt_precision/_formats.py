"""How one leaf is stored: what its codes mean, and the way there and back.

Blocks of elements with one scale lie along one axis and never go across rows, so that scales can be
sharded as their elements are.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from opt_precision import _bits, _maps
from opt_precision._place import fetched

if TYPE_CHECKING:
    from opt_partition import Rules, StateLeaf

Kind: TypeAlias = Literal["bfloat16", "float8", "dynamic8", "log8"]
PACKAGE: Final = "opt_precision"
VERSION: Final = 1
SHORTEST: Final = 64
LONGEST: Final = 512

_TINY: Final = float(jnp.finfo(jnp.float32).tiny)
_LOG_STEP: Final = _maps.LOG_DECADES * math.log2(10) / _maps.LOG_STEPS


@dataclasses.dataclass(frozen=True)
class Format:
    """How the elements of one leaf are stored; static, and equal where codes mean the same.

    Attributes:
      kind: the name of the codec.
      squared: whether values are non-negative, and stored by their square roots.
      stochastic: whether encoding rounds at random, so that the mean is kept.
      axis: the axis along which blocks lie.
      block: the elements that share a scale; 0 where there are no scales.
      dtype: the dtype that they are decoded to.
      version: of the meaning of the codes.
    """

    kind: Kind
    squared: bool
    stochastic: bool
    axis: int = 0
    block: int = 0
    dtype: str = "float32"
    version: int = VERSION

    @property
    def codes_dtype(self) -> Any:
        """The dtype of the codes.

        Those of `float8` are its bytes: to slice arrays of floats of eight bits, XLA for CPUs
        converts all of them for each block.
        """
        return jnp.bfloat16 if self.kind == "bfloat16" else jnp.uint8

    @property
    def needs_noise(self) -> bool:
        """Whether a step rounds at random: to keep the mean, or so that first moments decay."""
        return self.stochastic or not self.squared

    @property
    def rounding(self) -> str:
        """`'stochastic'` or `'nearest'`."""
        return "stochastic" if self.stochastic else "nearest"

    @property
    def name(self) -> str:
        """The name of the codec, as plans call it."""
        return self.kind

    @property
    def is_exact(self) -> bool:
        """Whether all digits of a float32 are kept."""
        return False

    @property
    def fields(self) -> tuple[str, ...]:
        """The arrays of an `Encoded`."""
        return ("codes", "scale") if self.block else ("codes",)

    def __str__(self) -> str:
        kind = f"{self.kind}-v{self.version}{' squared' if self.squared else ''}"
        blocks = f" {self.block} along {self.axis}" if self.block else ""
        return f"{kind}{blocks} {self.dtype}"

    def to_data(self) -> dict[str, Any]:
        """Returns what `read_storage` reads."""
        return {"package": PACKAGE, "of": "leaf", **dataclasses.asdict(self)}

    def decode(self, *arrays: jax.Array) -> jax.Array:
        """Returns the values of codes and scales, on the device."""
        decoded = functools.partial(_decoded, self)
        results = jax.typeof(arrays[0]).sharding
        values: jax.Array = _untyped(decoded, arrays[0], results)(*arrays)
        return values

    def encode(self, values: jax.Array) -> tuple[jax.Array, ...]:
        """Returns codes and scales of values, each rounded to nearest."""
        encoded = functools.partial(_encoded, self)
        like = jax.typeof(values).sharding
        results = (like, like.update(spec=PartitionSpec()))[: len(self.fields)]
        arrays: tuple[jax.Array, ...] = _untyped(encoded, values, results)(values)
        return arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Encoded:
    """A leaf of a state, stored in fewer bits; in the place of the leaf.

    Attributes:
      codes: of the leaf's shape; bfloat16, or uint8 (of `float8` the bits of float8_e4m3fn).
      scale: the largest magnitude of each block (of the square roots, for second moments), float32
        of shape `[..., ceil(n / block), ...]`; `None` for bfloat16.
      format: what codes and scale mean.
    """

    codes: jax.Array
    scale: jax.Array | None
    format: Format = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the leaf."""
        return tuple(self.codes.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the leaf when decoded."""
        return np.dtype(self.format.dtype)

    def leaf_storage(self) -> Format:
        """Returns what the codes mean, as `opt_core.protocols.StoresLeaf` asks.

        How they were rounded does not matter, nor are there roots without scales.
        """
        form = self.format
        is_squared = form.squared and form.block > 0
        return dataclasses.replace(form, stochastic=False, squared=is_squared)


def is_encoded(node: Any) -> bool:
    """Whether a node of a tree is an encoded leaf."""
    return isinstance(node, Encoded)


def encode(
    form: Format,
    x: jax.Array,
    noise: jax.Array | None,
    before: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the codes and scales of an array, or of its blocks; without noise to nearest.

    A first moment that decays by less than half a step of its code would stand still if it were
    rounded to nearest, while `v` beside it goes on to decay: the parameter would drift for ever.
    So what rounding would raise to the code that it had is rounded stochastically.
    """
    x = _bits.widen(x)
    if form.kind == "bfloat16":
        return _in_bfloat16(form, x, noise, before), None
    magnitude = x if form.squared else lax.abs(x)
    largest = block_max(magnitude, form.axis, form.block)
    scale = lax.sqrt(largest) if form.squared else largest
    # A block of zeros has no scale to divide by. The inverse is there for each block: divided by
    # a scale for each element, XLA would make it so here and there, where the last digits differ.
    divisor = lax.select(scale < _TINY, jnp.ones_like(scale), scale)
    inverse = spread(1 / divisor, form.axis, form.block, x.shape[form.axis])
    share = magnitude * inverse * (inverse if form.squared else 1)
    below, chance = _position(form, share, is_cut_off=noise is not None)
    lower, further = _coded(form, x, below)
    upper = lower + further
    is_up = chance >= 0.5
    if noise is not None:
        # Of 22 bits: the largest is less than a chance of 1 that was rounded down.
        uniform = (noise >> 10).astype(jnp.int32).astype(jnp.float32) * np.float32(2.0**-22)
        is_drawn = uniform < chance
        if form.stochastic:
            is_up = is_drawn
        elif before is not None:
            is_up &= (upper != before) | is_drawn
    return lax.select(is_up, upper, lower), scale


def _in_bfloat16(
    form: Format, x: jax.Array, noise: jax.Array | None, before: jax.Array | None
) -> jax.Array:
    nearest = _bits.round_nearest(x)
    if noise is None:
        return _bits.narrow(nearest)
    drawn = _bits.round_stochastic(x, noise)
    if form.stochastic or before is None:
        return _bits.narrow(drawn)
    is_held = as_bytes(_bits.narrow(nearest)) == as_bytes(before)
    is_held &= lax.abs(nearest) > lax.abs(x)
    # XLA selects bfloat16 by way of float32.
    return _bits.narrow(lax.select(is_held, drawn, nearest))


def _coded(form: Format, x: jax.Array, rank: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The code of numbers by the rank of their magnitude, and how far it is to the next rank's."""
    is_negative, one = x < 0, jnp.ones_like(rank)
    if form.squared:
        return rank, one
    if form.kind == "float8":
        return rank | jnp.where(is_negative, np.uint8(128), np.uint8(0)), one
    further = jnp.where(is_negative, np.uint8(255), one)
    return np.uint8(len(_maps.dynamic_magnitudes()) - 1) + rank * further, further


def decode(form: Format, codes: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Returns the values of codes, in the dtype of the format."""
    if scale is None:
        return _bits.widen(codes).astype(form.dtype)
    each = spread(scale, form.axis, form.block, codes.shape[form.axis])
    if form.kind == "log8":
        steps = codes.astype(jnp.float32) - _maps.LOG_STEPS
        value = lax.exp2(steps * np.float32(_LOG_STEP))
    else:
        value = _look_up(_by_code(form), codes)
    value = value * each
    return (value * value if form.squared else value).astype(form.dtype)


@functools.cache
def constant_codes(form: Format, value: float) -> tuple[int, float]:
    """The code and the scale of an array of which every element is `value`."""
    one_block = dataclasses.replace(form, block=min(form.block, 1))
    with jax.ensure_compile_time_eval():
        codes, scale = encode(one_block, jnp.full([1] * (form.axis + 1), value, jnp.float32), None)
        code = int(as_bytes(codes).reshape(()))
        return code, 0.0 if scale is None else float(scale.reshape(()))


def as_bytes(codes: jax.Array) -> jax.Array:
    """Codes as unsigned integers."""
    is_byte = codes.dtype == jnp.uint8
    return codes if is_byte else lax.bitcast_convert_type(codes, jnp.uint16)


def _table(form: Format) -> Callable[[], _maps.Table]:
    """The magnitudes, or the roots, that codes stand for."""
    if form.kind == "log8":
        return _maps.logarithmic
    if form.kind == "dynamic8":
        return _maps.dynamic_roots if form.squared else _maps.dynamic_magnitudes
    return _maps.e4m3_roots if form.squared else _maps.e4m3


def _by_code(form: Format) -> _maps.Table:
    """The value of each code."""
    table = _table(form)()
    if form.kind == "float8":
        return np.concatenate([table, table[-1:], -table, -table[-1:]])
    return table if form.squared else np.concatenate([-table[:0:-1], table, table[-1:]])


_ONE_BY_ONE: Final = lax.GatherDimensionNumbers((), (0,), (0,))


def _look_up(table: Any, index: jax.Array) -> jax.Array:
    # As `jnp` has it, whose own preparations take longer to trace than all else.
    wide = index.astype(jnp.int32)[..., None]
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(jnp.asarray(table), wide, _ONE_BY_ONE, (1,), mode=mode)


def _position(form: Format, y: jax.Array, *, is_cut_off: bool) -> tuple[jax.Array, jax.Array]:
    """The rank of the value, or square, below numbers from 0 to 1, and how far up the next is."""
    if form.kind == "log8":
        return _position_in_log(y)
    cells = _maps.cells(_table(form), squared=form.squared)
    cell = lax.min(_bits.bits_of(y) >> 16, jnp.full_like(y, _maps.CELLS - 1, jnp.uint32))
    edge = _look_up(cells.edge, cell)
    is_above = edge <= y
    low = lax.select(is_above, edge, _look_up(cells.low, cell))
    inverse = lax.select(is_above, *(_look_up(table, cell) for table in cells.inverses))
    chance = (y - low) * inverse
    if is_cut_off and not form.squared:
        chance = jnp.where(y < _maps.COARSE, 0, chance)
    return _look_up(cells.below, cell) + is_above.astype(jnp.uint8), chance


def _position_in_log(y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same for squares in the logarithmic map, without a table."""
    log = lax.log(jnp.maximum(y, np.float32(_maps.LOG_LEAST**2)))
    position = log * np.float32(1 / (2 * math.log(2) * _LOG_STEP)) + _maps.LOG_STEPS
    below = jnp.clip(lax.floor(position), 0, _maps.LOG_STEPS - 1)
    low = lax.exp2((below - _maps.LOG_STEPS) * np.float32(2 * _LOG_STEP))
    chance = (y - low) / (low * np.float32(2.0 ** (2 * _LOG_STEP) - 1))
    return below.astype(jnp.uint8), chance


def block_axis(shape: Sequence[int]) -> int:
    """The axis along which blocks lie: the last that is long enough for one, or the longest."""
    long = [axis for axis, size in enumerate(shape) if size >= SHORTEST]
    return long[-1] if long else max(range(len(shape)), key=lambda axis: (shape[axis], axis))


def block_size(size: int, wanted: int) -> int:
    """The size of blocks along an axis: as wanted where that divides it, or else near to it.

    Examples:
      >>> block_size(1024, 256), block_size(768, 256), block_size(1000, 256), block_size(50, 256)
      (256, 256, 500, 50)
    """
    if size % wanted == 0:
        return wanted
    divisors = [n for n in range(SHORTEST, LONGEST + 1) if size % n == 0]
    return divisors[-1] if divisors else min(size, wanted)


def scale_shape(shape: Sequence[int], axis: int, block: int) -> tuple[int, ...]:
    """The shape of the scales."""
    return (*shape[:axis], -(-shape[axis] // block), *shape[axis + 1 :])


def block_max(x: jax.Array, axis: int, block: int) -> jax.Array:
    """The largest element of each block; `x` is non-negative."""
    number = math.ceil(x.shape[axis] / block)
    if missing := number * block - x.shape[axis]:
        x = jnp.pad(x, [(0, missing if dim == axis else 0) for dim in range(x.ndim)])
    return x.reshape(*x.shape[:axis], number, block, *x.shape[axis + 1 :]).max(axis + 1)


def spread(scale: jax.Array, axis: int, block: int, size: int) -> jax.Array:
    """The scale of each element along an axis of `size` elements."""
    each = jnp.repeat(scale, block, axis)
    return each if each.shape[axis] == size else lax.slice_in_dim(each, 0, size, axis=axis)


@functools.partial(jax.jit, static_argnums=0)
def _decoded(form: Format, codes: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    return decode(form, fetched(codes), None if scale is None else fetched(scale))


@functools.partial(jax.jit, static_argnums=0)
def _encoded(form: Format, values: jax.Array) -> tuple[jax.Array, ...]:
    codes, scale = encode(form, fetched(values), None)
    return (codes,) if scale is None else (codes, scale)


def _untyped(function: Any, operand: jax.Array, results: Any) -> Any:
    """The function where shardings are not types: explicit ones forbid to look up by an index."""
    if not jax.typeof(operand).sharding.mesh.explicit_axes:
        return function
    return jax.sharding.auto_axes(function, out_sharding=results)


def partition_rules(base: Rules | None = None) -> Rules:
    """Returns rules by which opt-partition knows the leaves of encoded state.

    Codes have the dimensions of their parameter. So have scales, whose elements are blocks along
    one of them: that dimension is cut as the parameter's is where whole blocks lie on each device,
    and otherwise whole on every device, which the plan reports.

    Args:
      base: the rules for everything else.
    """
    return {**(base or {}), Encoded: encoded_axes}


def encoded_axes(leaf: StateLeaf) -> Any:
    """The axes of one array of an encoded leaf."""
    if leaf.parameter is None:
        return None
    if leaf.field == "codes":
        return tuple(range(len(leaf.shape)))
    form = leaf.state.format
    names = list(leaf.parameter.axes)
    if leaf.parameter.shape[form.axis] % form.block:
        names[form.axis] = None  # the last block is short: parts of equal size cut others
    return PartitionSpec(*names)
