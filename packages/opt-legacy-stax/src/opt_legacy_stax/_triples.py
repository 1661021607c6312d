"""The nine optimizers.

Each is written for one array `x` with gradient `g`; `optimizer` takes it to trees. The operations,
and their order, are those of `jax.example_libraries.optimizers`, but for what the README lists.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from opt_legacy_stax._optimizers import LeafOptimizer, optimizer
from opt_legacy_stax._schedules import make_schedule
from opt_legacy_stax._steps import next_step


def get_params(state: Any) -> Any:
    """Returns the parameter, which all but `sgd` and `sm3` keep as the first of a tuple."""
    return state[0]


@optimizer
def sgd(step_size: Any, *, upstream_numerics: bool = False) -> LeafOptimizer:
    """Gradient descent, `x - step_size * g`. Keeps `x`.

    Args:
      step_size: a number, or a function of the step.
      upstream_numerics: whether dtypes are promoted as in JAX's module.

    Returns:
      An `Optimizer`.

    Examples:
      >>> opt_init, opt_update, get_params = sgd(0.1)
      >>> get_params(opt_update(0, jnp.ones(2), opt_init(jnp.zeros(2)))).tolist()
      [-0.1, -0.1]
    """
    del upstream_numerics  # `optimizer` sees to it
    rate = make_schedule(step_size)

    def init(x0: Any) -> Any:
        return x0

    def update(i: Any, g: Any, x: Any) -> Any:
        return x - rate(i) * g

    def get_params(x: Any) -> Any:
        return x

    return init, update, get_params


@optimizer
def momentum(step_size: Any, mass: float, *, upstream_numerics: bool = False) -> LeafOptimizer:
    """Gradient descent with momentum. Keeps `(x, velocity)`.

    `velocity = mass * velocity + g`, `x - step_size * velocity`.

    Args:
      step_size: a number, or a function of the step.
      mass: the part of the velocity that is kept.
      upstream_numerics: whether dtypes are promoted as in JAX's module.

    Returns:
      An `Optimizer`.

    Examples:
      >>> opt_init, opt_update, get_params = momentum(0.1, mass=0.5)
      >>> state = opt_update(0, jnp.ones(1), opt_init(jnp.zeros(1)))
      >>> get_params(opt_update(1, jnp.ones(1), state)).tolist()
      [-0.25]
    """
    del upstream_numerics
    rate = make_schedule(step_size)

    def init(x0: Any) -> Any:
        return x0, jnp.zeros_like(x0)

    def update(i: Any, g: Any, state: Any) -> Any:
        x, velocity = state
        velocity = mass * velocity + g
        return x - rate(i) * velocity, velocity

    return init, update, get_params


@optimizer
def nesterov(step_size: Any, mass: float, *, upstream_numerics: bool = False) -> LeafOptimizer:
    """Gradient descent with Nesterov's momentum. Keeps `(x, velocity)`.

    `velocity = mass * velocity + g`, `x - step_size * (mass * velocity + g)`.

    Args:
      step_size: a number, or a function of the step.
      mass: the part of the velocity that is kept.
      upstream_numerics: whether dtypes are promoted as in JAX's module.

    Returns:
      An `Optimizer`.
    """
    del upstream_numerics
    rate = make_schedule(step_size)

    def init(x0: Any) -> Any:
        return x0, jnp.zeros_like(x0)

    def update(i: Any, g: Any, state: Any) -> Any:
        x, velocity = state
        velocity = mass * velocity + g
        return x - rate(i) * (mass * velocity + g), velocity

    return init, update, get_params


@optimizer
def adagrad(
    step_size: Any, momentum: float = 0.9, *, upstream_numerics: bool = False
) -> LeafOptimizer:
    """Adagrad with an average of its updates. Keeps `(x, g_sq, m)`.

    `g_sq` is the sum of squares, `m` the average of `g / sqrt(g_sq)`: Duchi, Hazan and Singer,
    Adaptive Subgradient Methods, http://www.jmlr.org/papers/volume12/duchi11a/duchi11a.pdf.

    Args:
      step_size: a number, or a function of the step.
      momentum: the weight of the past in the average.
      upstream_numerics: whether dtypes are promoted as in JAX's module.

    Returns:
      An `Optimizer`.
    """
    del upstream_numerics
    rate = make_schedule(step_size)

    def init(x0: Any) -> Any:
        return x0, jnp.zeros_like(x0), jnp.zeros_like(x0)

    def update(i: Any, g: Any, state: Any) -> Any:
        x, g_sq, m = state
        g_sq += jnp.square(g)
        m = (1.0 - momentum) * (g * _inverse_root(g_sq)) + momentum * m
        return x - rate(i) * m, g_sq, m

    return init, update, get_params


@optimizer
def rmsprop(
    step_size: Any, gamma: float = 0.9, eps: float = 1e-8, *, upstream_numerics: bool = False
) -> LeafOptimizer:
    """RMSProp, `x - step_size * g / sqrt(avg_sq_grad + eps)`. Keeps `(x, avg_sq_grad)`.

    Tieleman and Hinton, lecture 6.5 of Neural Networks for Machine Learning, 2012.

    Args:
      step_size: a number, or a function of the step.
      gamma: the weight of the past in the average of squares.
      eps: added to it, under the root.
      upstream_numerics: whether dtypes are promoted as in JAX's module.

    Returns:
      An `Optimizer`.
    """
    del upstream_numerics
    rate = make_schedule(step_size)

    def init(x0: Any) -> Any:
        return x0, jnp.zeros_like(x0)

    def update(i: Any, g: Any, state: Any) -> Any:
        x, avg_sq_grad = state
        avg_sq_grad = avg_sq_grad * gamma + jnp.square(g) * (1.0 - gamma)
        return x - rate(i) * g / jnp.sqrt(avg_sq_grad + eps), avg_sq_grad

    return init, update, get_params


@optimizer
def rmsprop_momentum(
    step_size: Any,
    gamma: float = 0.9,
    eps: float = 1e-8,
    momentum: float = 0.9,
    *,
    upstream_numerics: bool = False,
) -> LeafOptimizer:
    """RMSProp whose updates have momentum. Keeps `(x, avg_sq_grad, mom)`.

    `mom = momentum * mom + step_size * g / sqrt(avg_sq_grad + eps)`, `x - mom`.

    Args:
      step_size: a number, or a function of the step.
      gamma: the weight of the past in the average of squares.
      eps: added to it, under the root.
      momentum: the part of the last update that is kept.
      upstream_numerics: whether dtypes are promoted as in JAX's module.

    Returns:
      An `Optimizer`.
    """
    del upstream_numerics
    rate = make_schedule(step_size)

    def init(x0: Any) -> Any:
        return x0, jnp.zeros_like(x0), jnp.zeros_like(x0)

    def update(i: Any, g: Any, state: Any) -> Any:
        x, avg_sq_grad, mom = state
        avg_sq_grad = avg_sq_grad * gamma + jnp.square(g) * (1.0 - gamma)
        mom = momentum * mom + rate(i) * g / jnp.sqrt(avg_sq_grad + eps)
        return x - mom, avg_sq_grad, mom

    return init, update, get_params


@optimizer
def adam(
    step_size: Any,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    upstream_numerics: bool = False,
) -> LeafOptimizer:
    """Adam. Keeps `(x, m, v)`, the averages of the gradient and of its square.

    Kingma and Ba, Adam: A Method for Stochastic Optimization, https://arxiv.org/abs/1412.6980.

    Args:
      step_size: a number, or a function of the step.
      b1: the weight of the past in `m`.
      b2: the weight of the past in `v`.
      eps: added to the root of the corrected `v`.
      upstream_numerics: whether to compute exactly as JAX's module: dtypes are promoted, and in
        bfloat16 the default `b2` rounds to 1, so that parameters never move.

    Returns:
      An `Optimizer`.

    Examples:
      >>> opt_init, opt_update, get_params = adam(0.1)
      >>> get_params(opt_update(0, jnp.array([3.0, -0.1]), opt_init(jnp.zeros(2)))).tolist()
      [-0.1, 0.1]
    """
    rate = make_schedule(step_size)

    def init(x0: Any) -> Any:
        return x0, jnp.zeros_like(x0), jnp.zeros_like(x0)

    def update(i: Any, g: Any, state: Any) -> Any:
        x, m, v = state
        m = (1 - b1) * g + b1 * m
        v = (1 - b2) * jnp.square(g) + b2 * v
        mhat = m / _correction(b1, i, m.dtype, upstream_numerics)
        vhat = v / _correction(b2, i, m.dtype, upstream_numerics)
        return x - rate(i) * mhat / (jnp.sqrt(vhat) + eps), m, v

    return init, update, get_params


@optimizer
def adamax(
    step_size: Any,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    upstream_numerics: bool = False,
) -> LeafOptimizer:
    """AdaMax, Adam with a maximum. Keeps `(x, m, u)`.

    `u = max(b2 * u, |g|)`: section 7.1 of https://arxiv.org/abs/1412.6980.

    Args:
      step_size: a number, or a function of the step.
      b1: the weight of the past in `m`, the average of the gradient.
      b2: by which the maximum fades.
      eps: added to the maximum.
      upstream_numerics: whether to compute exactly as JAX's module; see `adam`.

    Returns:
      An `Optimizer`.
    """
    rate = make_schedule(step_size)

    def init(x0: Any) -> Any:
        return x0, jnp.zeros_like(x0), jnp.zeros_like(x0)

    def update(i: Any, g: Any, state: Any) -> Any:
        x, m, u = state
        m = (1 - b1) * g + b1 * m
        u = jnp.maximum(b2 * u, jnp.abs(g))
        corrected_rate = rate(i) / _correction(b1, i, m.dtype, upstream_numerics)
        return x - corrected_rate * m / (u + eps), m, u

    return init, update, get_params


@optimizer
def sm3(step_size: Any, momentum: float = 0.9, *, upstream_numerics: bool = False) -> LeafOptimizer:
    """SM3, Adagrad with one accumulator for each row, column and so on. Keeps `(x, m, vs, shape)`.

    `vs[j]` has the size of axis `j`; an entry's accumulator is the least of those that cover it.
    A scalar is kept as an array of one entry, and `shape` is `()`. Anil, Gupta, Koren and Singer,
    Memory-Efficient Adaptive Optimization, https://arxiv.org/abs/1901.11150.

    Args:
      step_size: a number, or a function of the step.
      momentum: the weight of the past in `m`, the average of the updates.
      upstream_numerics: whether dtypes are promoted as in JAX's module.

    Returns:
      An `Optimizer`.

    Examples:
      >>> opt_init, opt_update, get_params = sm3(0.1)
      >>> state = jax.jit(opt_update)(0, jnp.ones((2, 3)), opt_init(jnp.zeros((2, 3))))
      >>> jax.jit(get_params)(state).shape
      (2, 3)
    """
    del upstream_numerics
    rate = make_schedule(step_size)

    def init(x0: Any) -> Any:
        x_shape = jnp.shape(x0)
        x0 = jnp.atleast_1d(x0)
        vs = [jnp.zeros(size, dtype=x0.dtype) for size in x0.shape]
        return x0, jnp.zeros_like(x0), vs, x_shape

    def update(i: Any, g: Any, state: Any) -> Any:
        x, m, vs, x_shape = state
        covering = [_along(v, axis, jnp.ndim(g)) for axis, v in enumerate(vs)]
        accum = functools.reduce(jnp.minimum, covering) + jnp.square(g)
        m = (1.0 - momentum) * (g * _inverse_root(accum)) + momentum * m
        axes = range(x.ndim)
        if accum.size:  # there is no maximum of nothing, and nothing to add to zeros
            vs = [accum.max([k for k in axes if k != j]) for j in axes]
        return x - rate(i) * m, m, vs, x_shape

    def get_params(state: Any) -> Any:
        # The numbers in the shape are leaves, traced under `jit`; how many there are is static.
        x, _, _, x_shape = state
        return x if x_shape else x.reshape(())

    return init, update, get_params


def _inverse_root(x: Any) -> Any:
    return jnp.where(x > 0, 1.0 / jnp.sqrt(x), 0.0)


def _correction(decay: Any, i: Any, dtype: Any, upstream_numerics: bool) -> Any:
    """Returns `1 - decay ** (i + 1)` in `dtype`; the power is taken in 32 bits or more."""
    if upstream_numerics:
        return 1 - jnp.asarray(decay, dtype) ** (i + 1)
    wide = jnp.promote_types(dtype, jnp.float32)
    step = next_step(i)
    if not (isinstance(step, jax.Array) and jnp.issubdtype(step.dtype, jnp.integer)):
        step = jnp.asarray(step, wide)
    return (1 - jax.lax.pow(jnp.asarray(decay, wide), step)).astype(dtype)


def _along(v: Any, axis: int, ndim: int) -> Any:
    """Returns a vector as an array of `ndim` axes whose axis `axis` it is."""
    index: Sequence[Any] = [slice(None) if k == axis else None for k in range(max(ndim, 1))]
    return v[tuple(index)]
