"""Newton-Schulz iterations: a matrix's singular values are driven to one by products alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from opt_matrix.errors import OptionError

Coefficients = tuple[tuple[float, float, float], ...]

_MANY = 8  # steps after the first; the usual five are compiled one by one

KELLER: Coefficients = ((3.4445, -4.7750, 2.0315),)
DION: Coefficients = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
# Amsel et al., arXiv 2505.16932, for singular values from 1e-3 to 1. The polynomials are the best
# ones in exact arithmetic; the paper divides their arguments by 1.01 against rounding, but for the
# last, which is the fixed point and is repeated for as long as asked.
_POLAR: Coefficients = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
POLAR_EXPRESS: Coefficients = (
    *((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in _POLAR),
    (1.875, -1.25, 0.375),
)


@dataclasses.dataclass(frozen=True)
class NewtonSchulz:
    """A Newton-Schulz iteration over stacks of matrices; see `newton_schulz`.

    Plans ask a function for its `dtype` and `flops`, where it has them, and for `split` and
    `split_bytes` where matrices are to stay cut.

    Attributes:
      coefficients: `(a, b, c)` of each step, `f(X) = aX + b(XXᵀ)X + c(XXᵀ)²X`.
      is_constant: all steps have the same; Optax's state then keeps one triple and not one a step.
      dtype: what the matrices are sent and computed in; `None` for their own.
      eps: added to the norm that a matrix is divided by.
      gram: whether to iterate on `XXᵀ` alone.
    """

    coefficients: Coefficients
    is_constant: bool
    dtype: Any
    eps: float
    gram: bool

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns stacks `[..., m, n]` with singular values near one, in the iteration's dtype."""
        return self.split(x, (), *x.shape[-2:])

    def split(self, x: jax.Array, axes: tuple[str, ...], fan_in: int, fan_out: int) -> jax.Array:
        """Returns this device's part, where the larger side of each matrix is cut over `axes`."""
        x = x if self.dtype is None else x.astype(self.dtype)
        # The Gram matrix of the smaller side is the cheaper one; f(Xᵀ) = f(X)ᵀ.
        if fan_in > fan_out:
            return jnp.swapaxes(self._wide(jnp.swapaxes(x, -1, -2), axes), -1, -2)
        return self._wide(x, axes)

    def flops(self, fan_in: int, fan_out: int, parts: int = 1) -> float:
        """Returns floating-point operations for one matrix, whose larger side is cut in parts.

        Examples:
          >>> newton_schulz(1).flops(2, 3), newton_schulz(1).flops(2, 8, parts=4)
          (64.0, 48.0)
        """
        m, n = sorted((fan_in, fan_out))
        product = 2.0 * m * m * n / parts
        steps = len(self.coefficients)
        if self.gram:
            return 2 * product + 2.0 * m**3 * (4 * steps - 3)
        return steps * (2 * product + 2.0 * m**3)

    def split_bytes(self, fan_in: int, fan_out: int) -> tuple[int, int]:
        """Returns the all-reduces that `split` makes, and their bytes for one matrix."""
        count = 1 if self.gram else len(self.coefficients)
        return 1 + count, 4 + count * 4 * min(fan_in, fan_out) ** 2

    def state_coefficients(self) -> jax.Array:
        """Returns the coefficients as Optax's `MuonState` keeps them: `(3,)`, or one row a step."""
        kept = self.coefficients[0] if self.is_constant else self.coefficients
        return jnp.asarray(kept, jnp.float32)

    def _wide(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        # By a power of two, which rounds nothing: squares of large numbers would overflow.
        unit = _unit(x, axes)
        x, eps = x / unit.astype(x.dtype), self.eps / unit
        # One sum over devices serves both the norm and the first product.
        a = _gram(x, axes)
        norm = jnp.sqrt(jnp.trace(a, axis1=-2, axis2=-1))[..., None, None] + eps
        norm = jnp.where(norm == 0, 1, norm)  # zeros stay zeros
        a = a / norm**2
        if self.gram:
            return (_by_gram(x, a, self.coefficients) / norm).astype(x.dtype)

        def step(x: Any, row: Any, a: Any = None) -> Any:
            # Products are summed in float32 and rounded once: noise along small singular values
            # is what every step makes larger. The barrier keeps XLA from computing all steps' sums
            # again wherever the last is read, which keeps the matrices of all steps alive.
            a = _gram(x, axes) if a is None else a
            narrow = a.astype(x.dtype)
            b = (row[1] * a + row[2] * _product(narrow, narrow)).astype(x.dtype)
            return lax.optimization_barrier(
                (row[0] * x.astype(a.dtype) + _product(b, x)).astype(x.dtype)
            )

        first = (step(x, self.coefficients[0], a) / norm).astype(x.dtype)
        orthogonal: jax.Array = _repeat(step, first, self.coefficients[1:], a.dtype)
        return orthogonal


def newton_schulz(
    steps: int = 5,
    coefficients: str | Sequence[Sequence[float]] | np.ndarray = "keller",
    dtype: Any = jnp.bfloat16,
    *,
    eps: float = 1e-8,
    gram: bool = False,
) -> NewtonSchulz:
    """Returns an iteration that orthogonalizes stacks of matrices.

    Args:
      steps: number of steps; of an array of coefficients, the last ones.
      coefficients: `'keller'` (Optax's default), `'dion'` (5 steps), `'polar_express'` (any
        number), or an array `[n, 3]`.
      dtype: what the matrices are sent and computed in. `None` is their own, as in Optax.
      eps: added to the norm that a matrix is divided by, as in Optax: smaller matrices are noise,
        and come out smaller. With 0 all sizes come out alike; zeros stay zeros.
      gram: iterate on `XXᵀ` in float32 and multiply `X` once: fewer operations where one side is
        more than about 1.5 times the other, and one sum over devices where a matrix is split.

    Raises:
      OptionError: there are not so many coefficients, or `steps` is not positive.

    Examples:
      >>> x = jnp.array([[3.0, 0.0], [0.0, 1.0]])
      >>> newton_schulz(8, 'polar_express', jnp.float32)(x).round(2).tolist()
      [[1.0, 0.0], [0.0, 1.0]]
    """
    if not is_positive_integer(steps):
        raise OptionError(f"`steps` must be a positive integer; got {steps!r}")
    chosen = _NAMED.get(coefficients) if isinstance(coefficients, str) else _rows(coefficients)
    if chosen is None:
        raise OptionError(
            f"`coefficients` must be one of {sorted(_NAMED)} or an array [n, 3]; got "
            f"{coefficients!r}"
        )
    is_constant = chosen is KELLER
    if is_constant:
        chosen *= steps
    elif chosen is POLAR_EXPRESS:
        chosen = chosen[:steps] + chosen[-1:] * (steps - len(chosen))
    elif len(chosen) < steps:
        raise OptionError(
            f"`coefficients`: {len(chosen)} steps are given, and `steps` asks for {steps}"
        )
    dtype = None if dtype is None else jnp.dtype(dtype)
    return NewtonSchulz(chosen[-steps:], is_constant, dtype, float(eps), bool(gram))


_NAMED: dict[Any, Coefficients] = {
    "keller": KELLER,
    "dion": DION,
    "polar_express": POLAR_EXPRESS,
}


def is_positive_integer(value: Any) -> bool:
    """Whether it is Python's integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _rows(coefficients: Any) -> Coefficients:
    array = np.asarray(coefficients, np.float64)
    if array.ndim != 2 or array.shape[1] != 3 or not len(array):
        raise OptionError(f"`coefficients` must be an array [n, 3]; got the shape {array.shape}")
    return tuple((float(a), float(b), float(c)) for a, b, c in array)


def _unit(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """A power of two near the largest element of each matrix, over all devices."""
    largest = jnp.max(jnp.abs(x), (-2, -1), keepdims=True, initial=0).astype(_wide_dtype(x))
    largest = lax.pmax(largest, axes) if axes else largest
    limits = jnp.finfo(x.dtype)
    largest = jnp.clip(largest, float(limits.tiny), float(limits.max) / 4)
    return lax.reduce_precision(largest, jnp.finfo(largest.dtype).nexp, 0)


def _gram(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`XXᵀ`, summed over devices in float32: partial sums of bfloat16 would lose half of them."""
    partial = _product(x, jnp.swapaxes(x, -1, -2))
    return lax.psum(partial, axes) if axes else partial


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type=_wide_dtype(a))


def _by_gram(x: jax.Array, a: jax.Array, coefficients: Coefficients) -> jax.Array:
    """The product of all steps' polynomials of `A`, applied to `X` once."""
    a = a.astype(_wide_dtype(x))
    identity = jnp.eye(a.shape[-1], dtype=a.dtype)

    def polynomial(a: Any, row: Any) -> Any:
        return row[0] * identity + row[1] * a + (row[2] * a) @ a

    def step(carry: Any, row: Any) -> Any:
        product, b, a = carry
        a = b @ a @ b
        b = polynomial(a, row)
        return b @ product, b, a

    first = polynomial(a, coefficients[0])
    product: jax.Array = _repeat(step, (first, first, a), coefficients[1:], a.dtype)[0]
    return product.astype(x.dtype) @ x


def _repeat(step: Callable[[Any, Any], Any], carry: Any, rows: Coefficients, dtype: Any) -> Any:
    """Steps one after the other; a loop where they are many, whose body is compiled once."""
    if len(rows) >= _MANY:
        table = jnp.asarray(rows, dtype)
        return lax.fori_loop(0, len(rows), lambda n, carry: step(carry, table[n]), carry)
    for row in rows:
        carry = step(carry, row)
    return carry


def _wide_dtype(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)
