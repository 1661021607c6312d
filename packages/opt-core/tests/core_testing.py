"""What the tests share: a small optimizer, containers of every kind, equality to the bit."""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import flax.struct
import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.core import FrozenDict
from hypothesis import strategies as st
from opt_core import Optimizer, OptimizerDef, OptimizerState, check_gradients, increment_step

with warnings.catch_warnings():  # Flax 0.12.0 asks jax 0.8 for names that it deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from flax import nnx


def given(
    examples: int = 15, **strategies: st.SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Any]:
    """`hypothesis.given`, the same every time; a first example may compile for long."""
    settings = hypothesis.settings(
        deadline=None, max_examples=examples, derandomize=True, database=None
    )
    return lambda test: settings(hypothesis.given(**strategies)(test))


@flax.struct.dataclass
class MomentumHyperParams:
    learning_rate: Any
    beta: Any = 0.9


class Momentum(OptimizerDef):
    """SGD with momentum; one buffer per parameter."""

    def __init__(self, learning_rate: Any = 0.5, beta: Any = 0.5) -> None:
        super().__init__(MomentumHyperParams(learning_rate, beta))

    def init_state(self, params: Any) -> OptimizerState:
        return OptimizerState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def apply_gradient(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any
    ) -> tuple[Any, OptimizerState]:
        check_gradients(params, grads)
        lr, beta = hyper_params.learning_rate, hyper_params.beta
        momenta = jax.tree.map(
            lambda m, g: jnp.asarray(beta, m.dtype) * m + g.astype(m.dtype),
            state.param_states,
            grads,
        )
        params = jax.tree.map(lambda p, m: p - jnp.asarray(lr, p.dtype) * m, params, momenta)
        return params, OptimizerState(increment_step(state.step), momenta)


class Moments(NamedTuple):
    count: Any
    mu: Any


class Whole(OptimizerDef):
    """Has one state for the whole tree, as a transformation of Optax; takes `value`."""

    def __init__(self, learning_rate: Any = 0.5) -> None:
        super().__init__(MomentumHyperParams(learning_rate))

    def init_state(self, params: Any) -> OptimizerState:
        state = Moments(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))
        return OptimizerState(jnp.zeros((), jnp.int32), (state, ()))

    def extra_arg_names(self, names: Iterable[str]) -> frozenset[str]:
        return frozenset(names) & {"value"}

    def apply_gradient(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any, **extra: Any
    ) -> tuple[Any, OptimizerState]:
        rate = hyper_params.learning_rate * extra.get("value", 1.0)
        (old, rest) = state.param_states
        new = Moments(old.count + 1, jax.tree.map(jnp.add, old.mu, grads))
        params = jax.tree.map(lambda p, g: p - rate * g, params, grads)
        return params, OptimizerState(increment_step(state.step), (new, rest))


class KeepsParams(OptimizerDef):
    """Its state is the initial parameters themselves, under another name for the same memory."""

    def __init__(self, keep: Callable[[Any], Any] = lambda x: x) -> None:
        super().__init__(None)
        self.keep = keep

    def init_state(self, params: Any) -> OptimizerState:
        kept = jax.tree.map(self.keep, params)
        return OptimizerState(jnp.zeros((), jnp.int32), {"first": kept, "again": kept})

    def apply_gradient(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any
    ) -> tuple[Any, OptimizerState]:
        del hyper_params
        params = jax.tree.map(lambda p, g: p - g, params, grads)
        return params, OptimizerState(increment_step(state.step), state.param_states)


class Pair(NamedTuple):
    left: Any
    right: Any


@flax.struct.dataclass
class Layer:
    kernel: Any
    bias: Any = None


def _nnx_state() -> Any:
    return nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)


_W, _B = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([1.0, -1.0], np.float32)

# Fresh arrays each time: tests donate them. `trees` has every container, in small.
TARGETS: dict[str, Callable[[], Any]] = {
    "frozen": lambda: FrozenDict({"dense": {"w": jnp.array(_W)}, "b": jnp.array(_B)}),
    "sequences": lambda: ([jnp.array(_W), (jnp.array(_B), ())], None, jnp.array(_B)),
    "struct": lambda: Layer(jnp.array(_W), bias=[jnp.array(_B)]),
    "nnx": _nnx_state,
}

any_target = pytest.mark.parametrize("make", TARGETS.values(), ids=TARGETS.keys())


def structure(tree: Any) -> Any:
    """The treedef; `Any` because mypy finds no `==` on it."""
    return jax.tree.structure(tree)


def bits(leaf: Any) -> tuple[Any, ...]:
    """All there is to know about a leaf."""
    if not hasattr(leaf, "dtype"):
        return (type(leaf), leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return (str(leaf.dtype), *bits(jax.random.key_data(leaf)))
    data = np.asarray(leaf)
    return (str(data.dtype), data.shape, getattr(leaf, "weak_type", False), data.tobytes())


def assert_same(actual: Any, expected: Any) -> None:
    """The same containers, and leaves that are the same to the bit."""
    assert structure(actual) == structure(expected)
    assert list(map(bits, jax.tree.leaves(actual))) == list(map(bits, jax.tree.leaves(expected)))


def to_numpy(state_dict: Any) -> Any:
    """The state dict as a checkpoint library returns it."""
    return jax.tree.map(np.array, state_dict)


def advanced(optimizer: Optimizer, steps: int = 2) -> Optimizer:
    """An optimizer whose leaves are not all zero."""
    for _ in range(steps):
        optimizer = optimizer.apply_gradient(jax.tree.map(jnp.ones_like, optimizer.target))
    return optimizer


def leaf_paths(state_dict: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of the arrays in nested dicts; `None` is none."""
    if isinstance(state_dict, Mapping):
        for name, child in state_dict.items():
            yield from leaf_paths(child, (*names, name))
    elif state_dict is not None:
        yield names


def _array(dtype: Any, shape: tuple[int, ...], seed: int) -> jax.Array:
    if dtype == np.bool_:
        data = np.random.default_rng(seed).integers(0, 2, shape).astype(dtype)
    else:  # any bits: infinities, NaNs with payload, subnormal numbers
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        data = np.frombuffer(np.random.default_rng(seed).bytes(size), dtype).reshape(shape)
    return jnp.array(data)


arrays = st.builds(
    _array,
    st.sampled_from([np.float32, ml_dtypes.bfloat16, np.int32, np.bool_]),
    st.sampled_from([(), (3,), (2, 2), (0,), (1, 0)]),
    st.integers(0, 2**32 - 1),
)


# How to make a container of up to three children, with names to choose from.
_CONTAINERS: list[Callable[[list[Any], list[str]], Any]] = [
    lambda items, names: dict(zip(names, items, strict=False)),
    lambda items, names: FrozenDict(zip(names, items, strict=False)),
    lambda items, _: dict(zip([9, 10, -1], items, strict=False)),
    lambda items, _: items,
    lambda items, _: tuple(items),
    lambda items, _: Pair(*[*items, None, None][:2]),
    lambda items, _: Layer(*[*items, None, None][:2]),
]
_ORDERED = [lambda items, names: OrderedDict(zip(names, items, strict=False))]
_NAMES = ["kernel", "a/b", "/", "a", "", ".", "0", "1", "é"]


@st.composite
def _trees(draw: st.DrawFn, containers: list[Any], depth: int = 3) -> Any:
    # Not `st.recursive`: it is slow, and its description so long that Hypothesis warns of it.
    if depth == 0 or draw(st.integers(0, depth)) == 0:
        return draw(st.none() | arrays)
    items = [draw(_trees(containers, depth - 1)) for _ in range(draw(st.integers(0, 3)))]
    return draw(st.sampled_from(containers))(items, draw(st.permutations(_NAMES)))


flax_trees = _trees(_CONTAINERS)
"""Trees that `flax.serialization` can write."""
trees = _trees(_CONTAINERS + _ORDERED)
