"""The nine optimizers, the global norm, and gradient clipping by it.

Operations and their order are those of JAX, but for the fixes that the guide lists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from opt_legacy_stax._optimizers import INT32_MAX, LeafOptimizer, keep_dtype, optimizer
from opt_legacy_stax._schedules import make_schedule


def _with_zeros(count: int, update: Callable[[Any, Any, Any], Any]) -> LeafOptimizer:
    """Returns the optimizer that keeps the parameter and `count` arrays like it, zero at first."""

    def init(x0: Any) -> Any:
        return x0, *(jnp.zeros_like(x0) for _ in range(count))

    def get_params(state: Any) -> Any:
        return state[0]

    return init, update, get_params


@optimizer
def sgd(step_size: Any) -> LeafOptimizer:
    """Gradient descent. State per parameter: `x`.

    ```
    x <- x - step_size * g
    ```

    Args:
      step_size: a number, or a function of the step.

    Examples:
      >>> opt_init, opt_update, get_params = sgd(0.1)
      >>> get_params(opt_update(0, jnp.ones(2), opt_init(jnp.zeros(2)))).tolist()
      [-0.1, -0.1]
    """
    rate = make_schedule(step_size)

    def init(x0: Any) -> Any:
        return x0

    def update(i: Any, g: Any, x: Any) -> Any:
        return x - rate(i) * g

    def get_params(x: Any) -> Any:
        return x

    return init, update, get_params


@optimizer
def momentum(step_size: Any, mass: float) -> LeafOptimizer:
    """Gradient descent with momentum. State per parameter: `(x, velocity)`.

    ```
    velocity <- mass * velocity + g
    x <- x - step_size * velocity
    ```

    Args:
      step_size: a number, or a function of the step.
      mass: decay rate of the velocity.

    Examples:
      >>> opt_init, opt_update, get_params = momentum(0.1, mass=0.5)
      >>> state = opt_update(0, jnp.ones(1), opt_init(jnp.zeros(1)))
      >>> get_params(opt_update(1, jnp.ones(1), state)).tolist()
      [-0.25]
    """
    rate = make_schedule(step_size)

    def update(i: Any, g: Any, state: Any) -> Any:
        x, velocity = state
        velocity = mass * velocity + g
        return x - rate(i) * velocity, velocity

    return _with_zeros(1, update)


@optimizer
def nesterov(step_size: Any, mass: float) -> LeafOptimizer:
    """Gradient descent with Nesterov momentum. State per parameter: `(x, velocity)`.

    ```
    velocity <- mass * velocity + g
    x <- x - step_size * (mass * velocity + g)
    ```

    Args:
      step_size: a number, or a function of the step.
      mass: decay rate of the velocity.

    References:
      Sutskever et al., 2013, https://proceedings.mlr.press/v28/sutskever13.html.
    """
    rate = make_schedule(step_size)

    def update(i: Any, g: Any, state: Any) -> Any:
        x, velocity = state
        velocity = mass * velocity + g
        return x - rate(i) * (mass * velocity + g), velocity

    return _with_zeros(1, update)


@optimizer
def adagrad(step_size: Any, momentum: float = 0.9) -> LeafOptimizer:
    """Adagrad with momentum. State per parameter: `(x, g_sq, m)`.

    ```
    g_sq <- g_sq + g**2
    m <- momentum * m + (1 - momentum) * g / sqrt(g_sq)
    x <- x - step_size * m
    ```

    `g / sqrt(g_sq)` is 0 where `g_sq` is 0.

    Args:
      step_size: a number, or a function of the step.
      momentum: decay rate of `m`.

    References:
      Duchi, Hazan and Singer, 2011, https://jmlr.org/papers/v12/duchi11a.html.
    """
    rate = make_schedule(step_size)

    def update(i: Any, g: Any, state: Any) -> Any:
        x, g_sq, m = state
        g_sq += jnp.square(g)
        m = (1.0 - momentum) * (g * _inverse_root(g_sq)) + momentum * m
        return x - rate(i) * m, g_sq, m

    return _with_zeros(2, update)


@optimizer
def rmsprop(step_size: Any, gamma: float = 0.9, eps: float = 1e-8) -> LeafOptimizer:
    """RMSProp. State per parameter: `(x, avg_sq_grad)`.

    ```
    avg_sq_grad <- gamma * avg_sq_grad + (1 - gamma) * g**2
    x <- x - step_size * g / sqrt(avg_sq_grad + eps)
    ```

    Args:
      step_size: a number, or a function of the step.
      gamma: decay rate of `avg_sq_grad`.
      eps: added to `avg_sq_grad` inside the square root.

    References:
      Tieleman and Hinton, lecture 6.5, 2012,
      https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf.
    """
    rate = make_schedule(step_size)

    def update(i: Any, g: Any, state: Any) -> Any:
        x, avg_sq_grad = state
        avg_sq_grad = avg_sq_grad * gamma + jnp.square(g) * (1.0 - gamma)
        return x - rate(i) * g / jnp.sqrt(avg_sq_grad + eps), avg_sq_grad

    return _with_zeros(1, update)


@optimizer
def rmsprop_momentum(
    step_size: Any,
    gamma: float = 0.9,
    eps: float = 1e-8,
    momentum: float = 0.9,
) -> LeafOptimizer:
    """RMSProp with momentum. State per parameter: `(x, avg_sq_grad, mom)`.

    ```
    avg_sq_grad <- gamma * avg_sq_grad + (1 - gamma) * g**2
    mom <- momentum * mom + step_size * g / sqrt(avg_sq_grad + eps)
    x <- x - mom
    ```

    Args:
      step_size: a number, or a function of the step.
      gamma: decay rate of `avg_sq_grad`.
      eps: added to `avg_sq_grad` inside the square root.
      momentum: decay rate of `mom`.
    """
    rate = make_schedule(step_size)

    def update(i: Any, g: Any, state: Any) -> Any:
        x, avg_sq_grad, mom = state
        avg_sq_grad = avg_sq_grad * gamma + jnp.square(g) * (1.0 - gamma)
        mom = momentum * mom + rate(i) * g / jnp.sqrt(avg_sq_grad + eps)
        return x - mom, avg_sq_grad, mom

    return _with_zeros(2, update)


@optimizer
def adam(
    step_size: Any,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    upstream_numerics: bool = False,
) -> LeafOptimizer:
    """Adam. State per parameter: `(x, m, v)`.

    ```
    m <- b1 * m + (1 - b1) * g
    v <- b2 * v + (1 - b2) * g**2
    m_hat = m / (1 - b1**(i + 1))
    v_hat = v / (1 - b2**(i + 1))
    x <- x - step_size * m_hat / (sqrt(v_hat) + eps)
    ```

    Args:
      step_size: a number, or a function of the step.
      b1: decay rate of `m`.
      b2: decay rate of `v`.
      eps: added to the square root of `v_hat`.
      upstream_numerics: whether to compute exactly like JAX's module: dtypes are promoted, and in
        bfloat16 the default `b2` rounds to 1, so that parameters never move.

    Examples:
      >>> opt_init, opt_update, get_params = adam(0.1)
      >>> get_params(opt_update(0, jnp.array([3.0, -0.1]), opt_init(jnp.zeros(2)))).tolist()
      [-0.1, 0.1]

    References:
      Kingma and Ba, 2014, https://arxiv.org/abs/1412.6980.
    """
    rate = make_schedule(step_size)

    def update(i: Any, g: Any, state: Any) -> Any:
        x, m, v = state
        m = (1 - b1) * g + b1 * m
        v = (1 - b2) * jnp.square(g) + b2 * v
        mhat = m / _correction(b1, i, m.dtype, upstream_numerics)
        vhat = v / _correction(b2, i, m.dtype, upstream_numerics)
        return x - rate(i) * mhat / (jnp.sqrt(vhat) + eps), m, v

    return _with_zeros(2, update)


@optimizer
def adamax(
    step_size: Any,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    upstream_numerics: bool = False,
) -> LeafOptimizer:
    """AdaMax, the variant of Adam based on the infinity norm. State per parameter: `(x, m, u)`.

    ```
    m <- b1 * m + (1 - b1) * g
    u <- max(b2 * u, |g|)
    x <- x - step_size / (1 - b1**(i + 1)) * m / (u + eps)
    ```

    Args:
      step_size: a number, or a function of the step.
      b1: decay rate of `m`.
      b2: decay rate of `u`.
      eps: added to `u` in the denominator.
      upstream_numerics: see `adam`.

    References:
      Kingma and Ba, 2014, section 7.1, https://arxiv.org/abs/1412.6980.
    """
    rate = make_schedule(step_size)

    def update(i: Any, g: Any, state: Any) -> Any:
        x, m, u = state
        m = (1 - b1) * g + b1 * m
        u = jnp.maximum(b2 * u, jnp.abs(g))
        corrected_rate = rate(i) / _correction(b1, i, m.dtype, upstream_numerics)
        return x - corrected_rate * m / (u + eps), m, u

    return _with_zeros(2, update)


@optimizer
def sm3(step_size: Any, momentum: float = 0.9) -> LeafOptimizer:
    """SM3, a memory-efficient Adagrad. State per parameter: `(x, m, vs, shape)`.

    There is one accumulator per slice along each axis: `vs[j]` is a vector with the size of axis
    `j`. For a matrix:

    ```
    accum[r, c] = min(vs[0][r], vs[1][c]) + g[r, c]**2
    m <- momentum * m + (1 - momentum) * g / sqrt(accum)
    vs[0][r] <- max over c of accum[r, c];  vs[1][c] <- max over r of accum[r, c]
    x <- x - step_size * m
    ```

    `g / sqrt(accum)` is 0 where `accum` is 0. Scalars are stored as arrays of one entry, with the
    shape `()`.

    Args:
      step_size: a number, or a function of the step.
      momentum: decay rate of `m`.

    Examples:
      >>> opt_init, opt_update, get_params = sm3(0.1)
      >>> state = jax.jit(opt_update)(0, jnp.ones((2, 3)), opt_init(jnp.zeros((2, 3))))
      >>> jax.jit(get_params)(state).shape
      (2, 3)

    References:
      Anil et al., 2019, https://arxiv.org/abs/1901.11150.
    """
    rate = make_schedule(step_size)

    def init(x0: Any) -> Any:
        x_shape = jnp.shape(x0)
        x0 = jnp.atleast_1d(x0)
        vs = [jnp.zeros(size, dtype=x0.dtype) for size in x0.shape]
        return x0, jnp.zeros_like(x0), vs, x_shape

    def update(i: Any, g: Any, state: Any) -> Any:
        x, m, vs, x_shape = state
        ndim = max(jnp.ndim(g), 1)
        covering = [
            jnp.expand_dims(v, [k for k in range(ndim) if k != axis]) for axis, v in enumerate(vs)
        ]
        accum = functools.reduce(jnp.minimum, covering) + jnp.square(g)
        m = (1.0 - momentum) * (g * _inverse_root(accum)) + momentum * m
        axes = range(x.ndim)
        if accum.size:  # the maximum of an empty array is an error
            vs = [accum.max([k for k in axes if k != j]) for j in axes]
        return x - rate(i) * m, m, vs, x_shape

    def get_params(state: Any) -> Any:
        # The entries of the shape are leaves, hence traced under `jit`; its length is static.
        x, _, _, x_shape = state
        return x if x_shape else x.reshape(())

    return init, update, get_params


def l2_norm(tree: Any) -> Any:
    """Returns the global L2 norm of a tree: the root of the sum of squares of all leaves.

    Examples:
      >>> float(l2_norm({'a': jnp.array([3.0]), 'b': jnp.array([4.0])}))
      5.0
    """
    return jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(tree)))


def clip_grads(grad_tree: Any, max_norm: Any, *, upstream_numerics: bool = False) -> Any:
    """Scales gradients down so that their global norm is at most `max_norm`.

    ```
    g <- g * min(1, max_norm / l2_norm(grad_tree))
    ```

    Args:
      grad_tree: pytree of arrays.
      max_norm: the maximum norm. NaN makes all gradients NaN.
      upstream_numerics: whether to compute exactly like JAX's module, where zeros clipped to 0
        become NaN, a single NaN makes all gradients NaN, and leaves of low precision are promoted
        to the dtype of the norm.

    Returns:
      The gradients, in their own dtypes. If the norm is NaN they are returned unchanged, so that a
      wrapper can still see which gradients are NaN.

    References:
      Pascanu, Mikolov and Bengio, 2013, https://arxiv.org/abs/1211.5063.

    Examples:
      >>> clip_grads([jnp.array([3.0, 4.0])], 1.0)[0].tolist()
      [0.6, 0.8]
      >>> clip_grads([jnp.zeros(2)], 0.0)[0].tolist()
      [0.0, 0.0]
    """
    norm = l2_norm(grad_tree)
    if upstream_numerics:
        return jax.tree.map(
            lambda g: jnp.where(norm < max_norm, g, g * (max_norm / norm)), grad_tree
        )
    stays = (norm <= max_norm) | jnp.isnan(norm)

    return jax.tree.map(
        lambda g: keep_dtype(g, jnp.where(stays, g, g * (max_norm / norm))), grad_tree
    )


def _inverse_root(x: Any) -> Any:
    return jnp.where(x > 0, 1.0 / jnp.sqrt(x), 0.0)


def _correction(decay: Any, i: Any, dtype: Any, upstream_numerics: bool) -> Any:
    """Returns `1 - decay ** (i + 1)` in `dtype`, with the power computed in at least float32."""
    if upstream_numerics:
        return 1 - jnp.asarray(decay, dtype) ** (i + 1)
    wide = jnp.promote_types(dtype, jnp.float32)
    step = _next_step(i)
    if not (isinstance(step, jax.Array) and jnp.issubdtype(step.dtype, jnp.integer)):
        step = jnp.asarray(step, wide)
    return (1 - jax.lax.pow(jnp.asarray(decay, wide), step)).astype(dtype)


def _next_step(i: Any) -> Any:
    """Returns `i + 1`, or `i` if the integer would overflow."""
    if isinstance(i, int):  # an array is no constant of the program, which steps then share
        return jnp.int32(min(i, INT32_MAX - 1) + 1)
    if isinstance(i, jax.Array) and jnp.issubdtype(i.dtype, jnp.integer):
        return jnp.minimum(i, jnp.iinfo(i.dtype).max - 1) + 1
    return i + 1
