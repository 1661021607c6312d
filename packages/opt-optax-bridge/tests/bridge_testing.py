"""What the tests share: every optimizer of the installed Optax, found and not listed."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge
import optax
import optax.contrib
from flax import serialization
from opt_core import Optimizer
from opt_optax_bridge import OptaxWrapper

LEARNING_RATE = 0.1

# Arguments that have no default, by optimizer. A learning rate is given to all.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "dpsgd": {"l2_norm_clip": 1.0, "noise_multiplier": 0.5, "seed": 0},
    "noisy_sgd": {"key": jax.random.key(0)},
    "schedule_free": {"base_optimizer": optax.sgd(LEARNING_RATE)},
    "mechanize": {"base_optimizer": optax.sgd(LEARNING_RATE)},
    "sam": {
        "optimizer": optax.sgd(LEARNING_RATE),
        "adv_optimizer": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.05)),
    },
}


def make_params(dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    return {
        "b": jnp.array([0.5, -1.5, 2.0], dtype),
        "w": jnp.array([[0.3, -0.7, 1.1], [-0.2, 0.9, -1.3]], dtype),
    }


def loss(params: Any) -> jax.Array:
    total = sum(jnp.sum(jnp.cos(x) + x * x) for x in jax.tree.leaves(params))
    return jnp.asarray(total)


def grads_of(name: str, params: Any) -> Any:
    """Gradients as the optimizer takes them."""
    grads = jax.grad(loss)(params)
    if name in ("dpsgd", "differentially_private_aggregate"):  # one per example
        return jax.tree.map(lambda g: jnp.stack([g, -g / 2]), grads)
    return grads


def extra_args_of(name: str, params: Any, grads: Any) -> dict[str, Any]:
    """What the optimizer's update takes besides gradients, state and parameters."""
    match name:
        case "lbfgs" | "scale_by_backtracking_linesearch" | "scale_by_zoom_linesearch":
            return {"value": loss(params), "grad": grads, "value_fn": loss}
        case "momo" | "momo_adam" | "polyak_sgd" | "reduce_on_plateau" | "scale_by_polyak":
            return {"value": loss(params)}
        case "sophia" | "hutchinson_estimator_diag_hessian":
            return {"obj_fn": loss}
    return {}


def arguments_of(name: str, constructor: Callable[..., Any]) -> dict[str, Any]:
    """The arguments that the constructor cannot do without."""
    known = {"learning_rate": LEARNING_RATE, **ARGUMENTS.get(name, {})}
    needed = dict(ARGUMENTS.get(name, {}))
    for parameter in inspect.signature(constructor).parameters.values():
        is_named = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if is_named and parameter.default is parameter.empty:
            if parameter.name not in known:
                raise LookupError(
                    f"Optax's `{name}` needs `{parameter.name}`: give it one in `ARGUMENTS` of "
                    "bridge_testing.py (and what its update needs in `extra_args_of`)"
                )
            needed[parameter.name] = known[parameter.name]
    return needed


def constructor_of(name: str) -> Callable[..., Any]:
    """Optax's own."""
    module = optax if name in vars(optax) else optax.contrib
    return cast(Callable[..., Any], getattr(module, name))


def transformation(name: str, **arguments: Any) -> Any:
    """Built by Optax."""
    constructor = constructor_of(name)
    return constructor(**{**arguments_of(name, constructor), **arguments})


def definition(name: str, **arguments: Any) -> OptaxWrapper:
    """Built by the wrapped."""
    known = arguments_of(name, constructor_of(name))
    made = getattr(opt_optax_bridge, name)(**{**known, **arguments})
    assert isinstance(made, OptaxWrapper)
    return made


def step(name: str, optimizer: Optimizer, **overrides: Any) -> Optimizer:
    """One step on `loss`."""
    params = optimizer.target
    grads = grads_of(name, params)
    return optimizer.apply_gradient(grads, **extra_args_of(name, params, grads), **overrides)


@functools.cache
def inputs(name: str) -> tuple[Any, dict[str, Any]]:
    """The gradients and extra arguments of the third step."""
    params = trained(name).target
    grads = grads_of(name, params)
    return grads, extra_args_of(name, params, grads)


def third_step(name: str, **overrides: Any) -> Optimizer:
    grads, extra_args = inputs(name)
    return trained(name).apply_gradient(grads, **extra_args, **overrides)


def third_step_by_optax(name: str, **arguments: Any) -> tuple[Any, Any]:
    """Parameters and state of the step that Optax makes when it is built with these arguments."""
    grads, extra_args = inputs(name)
    optimizer = trained(name)
    tx = transformation(name, **arguments)
    updates, state = tx.update(grads, optimizer.state.param_states, optimizer.target, **extra_args)
    return optax.apply_updates(optimizer.target, updates), state


def jitted_once(function: Callable[..., Any]) -> Any:
    """Compiled; tracing it again is an error."""
    traces: list[None] = []

    def traced(*args: Any) -> Any:
        traces.append(None)
        assert len(traces) == 1
        return function(*args)

    return jax.jit(traced)


@functools.cache
def compiled_step(name: str) -> Any:
    """`step`, compiled once for the whole session; its argument is donated."""
    return jax.jit(functools.partial(step, name), donate_argnums=0)


@functools.cache
def trained(name: str) -> Optimizer:
    """An optimizer two steps on. Nobody may donate it."""
    optimizer = definition(name).create(make_params())
    return cast(Optimizer, compiled_step(name)(compiled_step(name)(optimizer)))


def through_bytes(state_dict: Mapping[str, Any]) -> Any:
    """What a checkpoint file gives back."""
    as_numpy = jax.tree.map(np.asarray, dict(state_dict))
    return serialization.msgpack_restore(serialization.msgpack_serialize(as_numpy))


def structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


def avals(tree: Any) -> Any:
    """Structure, shapes, dtypes and weak types."""
    leaves = jax.tree.leaves(tree)
    return structure(tree), [(x.shape, x.dtype, getattr(x, "weak_type", False)) for x in leaves]


def as_data(leaf: Any) -> Any:
    """A leaf as NumPy sees it, typed PRNG keys included."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def assert_same_bits(a: Any, b: Any) -> None:
    assert avals(a) == avals(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(as_data(x), as_data(y))


def are_close(a: Any, b: Any, rtol: float = 2e-5, atol: float = 1e-6) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.allclose(as_data(x), as_data(y), rtol=rtol, atol=atol) for x, y in pairs)


def assert_close(a: Any, b: Any, rtol: float = 2e-5, atol: float = 1e-6) -> None:
    assert structure(a) == structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(as_data(x), as_data(y), rtol=rtol, atol=atol)


def labels() -> dict[str, bool]:
    return {"b": False, "w": True}
