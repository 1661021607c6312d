"""States that users write, of which it is known what each dimension is, equal sizes included."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from opt_partition import explain
from opt_partition.errors import UndecidedError

Tree = Any
Names = tuple[str | None, ...]

# The sizes of constants below (64, 48, 16, 4) are sizes of parameters, too.
SHAPES: dict[str, tuple[int, ...]] = {
    "wide": (48, 80),
    "tall": (80, 48),
    "square": (64, 64),
    "large": (512, 256),
    "expert": (4, 16, 64),
    "again": (64, 64),
    "bias": (64,),
}
PARAMS = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
AXES = {name: tuple(f"{name}{d}" for d in range(len(s))) for name, s in SHAPES.items()}
LAYERS = {f"layer_{i}": {"w": PARAMS["square"], "b": PARAMS["bias"]} for i in range(3)}
LAYER_AXES = {name: {"w": ("embed", "heads"), "b": ("heads",)} for name in LAYERS}


def zeros(*shape: Any) -> jax.Array:
    return jnp.zeros(shape)


def normal(*shape: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape)


def longer(p: Any) -> int:
    return 0 if p.shape[0] >= p.shape[-1] else -1


# Each: a function of a parameter, and the names of its result. In the functions of names, `p` has
# the shape as well, as what a state keeps may depend on it.
class P:
    """A parameter with names in the place of its sizes."""

    def __init__(self, name: str) -> None:
        self.shape, self.names = SHAPES[name], AXES[name]
        self.ndim, self.size = len(self.shape), math.prod(self.shape)


Case = tuple[Callable[[Any], Any], Callable[[P], Any]]
MATRICES: dict[str, Case] = {
    # Projections.
    "rank of a size": (lambda p: zeros(p.shape[0], 64), lambda p: (p.names[0], None)),
    "capped rank": (
        lambda p: zeros(p.shape[0], min(96, *p.shape)),
        lambda p: (p.names[0], None),
    ),
    "longer side": (
        lambda p: zeros(p.shape[longer(p)], 4),
        lambda p: (p.names[longer(p)], None),
    ),
    # Kronecker factors.
    "unfolded": (
        lambda p: p.reshape(p.shape[0], -1).T,
        lambda p: (p.names[1] if p.ndim == 2 else None, p.names[0]),
    ),
    "product": (
        lambda p: (x := p.reshape(-1, p.shape[-1])).T @ x,
        lambda p: (p.names[-1], p.names[-1]),
    ),
    "eigenvectors": (
        lambda p: tuple(jnp.linalg.eigh(jnp.eye(n)) for n in p.shape),
        lambda p: tuple([(n,), (n, n)] for n in p.names),
    ),
    # Histories.
    "history of a size": (lambda p: zeros(48, *p.shape), lambda p: (None, *p.names)),
    "history of values": (lambda p: jnp.stack([p * 0] * 64), lambda p: (None, *p.names)),
    # Buckets and thresholds.
    "bucket": (
        lambda p: zeros(next(n for n in (64, 256, 1024) if n >= p.shape[0])),
        lambda p: (None,),
    ),
    "factored": (
        lambda p: zeros(p.shape[0]) if min(p.shape) >= 64 else zeros(*p.shape),
        lambda p: (p.names[0],) if min(p.shape) >= 64 else p.names,
    ),
    # Statistics.
    "rows": (lambda p: zeros(*p.shape[:-1]), lambda p: p.names[:-1]),
    "kept": (
        lambda p: jnp.max(jnp.abs(p), axis=-1, keepdims=True),
        lambda p: (*p.names[:-1], None),
    ),
    "each": (lambda p: tuple(zeros(n) for n in p.shape), lambda p: tuple((n,) for n in p.names)),
    "transposed": (lambda p: zeros(*p.shape[::-1]), lambda p: p.names[::-1]),
    "top": (lambda p: p[:4], lambda p: (None, *p.names[1:])),
    # Loops and maps.
    "vmapped columns": (
        jax.vmap(lambda column: column.sum(), in_axes=-1),
        lambda p: (p.names[-1],),
    ),
    "scanned": (
        lambda p: lax.scan(lambda s, row: (s + row, row.sum()), jnp.zeros_like(p[0]), p),
        lambda p: (p.names[1:], (p.names[0],)),
    ),
    "keys": (lambda p: jax.random.split(jax.random.key(0), 64), lambda p: (None,)),
}


def is_names(node: Any) -> bool:
    return isinstance(node, tuple) and all(x is None or isinstance(x, str) for x in node)


def check(init: Any, expected: Tree) -> None:
    rows = explain(init, PARAMS, AXES, strict=True).rows
    assert [row.axes for row in rows] == jax.tree.leaves(expected, is_leaf=is_names)


@pytest.mark.parametrize("name", MATRICES)
def test_matrices(name: str) -> None:
    """By name, and in a list, backwards."""
    make, names = MATRICES[name]
    kept = [name for name, shape in SHAPES.items() if len(shape) > 1]
    check(
        lambda params: {name: make(params[name]) for name in kept},
        {name: names(P(name)) for name in kept},
    )
    check(
        lambda params: [make(params[name]) for name in kept[::-1]],
        [names(P(name)) for name in kept[::-1]],
    )


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def axes_of(init: Any, params: Any, axes: Any, **options: Any) -> dict[str, Any]:
    return {row.path: row.axes for row in explain(init, params, axes, **options).rows}


# Whole trees.


def test_stacked_parameters() -> None:
    """Those of one shape have names if they are the same, and otherwise none are guessed."""

    def init(params: Any) -> Any:
        groups: dict[Any, list[Any]] = {}
        for p in jax.tree.leaves(params):
            groups.setdefault(p.shape, []).append(p)
        return [{"mu": jnp.stack(each), "n": zeros(len(each))} for each in groups.values()]

    names: Any = {"0/mu": (None, "heads"), "0/n": (None,), "1/mu": (None, "embed", "heads")}
    assert axes_of(init, LAYERS, LAYER_AXES, strict=True) == {**names, "1/n": (None,)}
    other = {**LAYER_AXES, "layer_1": {"w": ("embed", "kv"), "b": ("heads",)}}
    rows = explain(init, LAYERS, other).rows
    assert [row.axes for row in rows] == [(None, None), (None,), (None, None, None), (None,)]
    assert [row.path for row in rows if row.source == "fallback"] == [row.path for row in rows]


def test_a_vmap_over_stacked_parameters() -> None:
    def init(params: Any) -> Any:
        return jax.vmap(lambda w: {"left": zeros(w.shape[0], w.shape[0]), "rank": zeros(4)})(params)

    found = axes_of(init, struct(12, 64, 64), ("layers", "embed", "heads"), strict=True)
    assert found == {"left": ("layers", "embed", "embed"), "rank": ("layers", None)}


def test_the_parameter_of_equal_layers_in_a_list() -> None:
    def init(params: Any) -> Any:
        return [zeros(*p.shape, p.shape[0]) for p in jax.tree.leaves(params)[::-1]]

    rows = explain(init, LAYERS, LAYER_AXES, strict=True).rows
    paths = [f"layer_{i}/{name}" for i in range(3) for name in "bw"]
    assert [row.parameter for row in rows] == paths[::-1]
    assert [row.axes for row in rows] == [("embed", "heads", "embed"), ("heads", "heads")] * 3


def test_dimensions_without_a_name() -> None:
    """They are numbers, so `init` may count with them."""

    def init(params: Any) -> Any:
        taps = [zeros(*params.shape[2:]) for _ in range(params.shape[0])]
        return {"mu": jnp.zeros_like(params), "taps": taps, "sum": params.sum((0, 1))}

    rows = explain(init, struct(3, 3, 16, 32), (None, None, "in", "out"), strict=True).rows
    assert rows[0].dims == (0, 1, 2, 3)
    assert [row.axes for row in rows] == [(None, None, "in", "out")] + [("in", "out")] * 4
    assert axes_of(init, struct(3, 3, 16, 32), None)["mu"] == (None,) * 4


def test_a_name_with_several_sizes() -> None:
    params, axes = [struct(64), struct(32), struct(64, 32)], ["x", "x", ("x", "x")]
    names = [(name,) if isinstance(name, str) else name for name in axes]
    init = per_leaf(lambda p: zeros(2, *p.shape[::-1]))
    rows = explain(init, params, names, strict=True).rows
    assert [row.axes for row in rows] == [(None, "x"), (None, "x"), (None, "x", "x")]
    assert [row.dims for row in rows] == [(None, 0), (None, 0), (None, 1, 0)]


def per_leaf(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda params: jax.tree.map(make, params)


@pytest.mark.parametrize(
    ("make", "size", "names"),
    [
        (jnp.squeeze, 1, ("b",)),
        (lambda p: zeros(2, p.shape[1]) if p.shape[0] == 1 else p, 1, (None, "b")),
        (lambda p: p + jnp.ones((1, 1)), 1, ("a", "b")),
        (lambda p: zeros(3, *p.shape), 0, (None, "a", "b")),
        (lambda p: zeros(1) if p.size == 0 else p, 0, (None,)),
    ],
)
def test_sizes_of_one_and_none(make: Any, size: int, names: Names) -> None:
    [row] = explain(make, struct(size, 8), ("a", "b"), strict=True).rows
    assert [n for n, s in zip(row.axes, row.shape, strict=True) if s > 1] == [
        n for n, s in zip(names, row.shape, strict=True) if s > 1
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: zeros(int(p.shape[0])),
        lambda p: jnp.asarray(np.zeros(p.shape, np.float32)),
        lambda p: jnp.stack([zeros(p.shape[1]) for _ in range(p.shape[0])]),
        lambda p: zeros(2, 64) if p.shape[0] == 64 else zeros(1, 64),
        lambda p: zeros(64, 64),  # e.g. of other parameters, which it captured
    ],
)
def test_what_needs_numbers_is_undecided(make: Any) -> None:
    with pytest.raises(UndecidedError, match=r"(on|are) symbols|does not take it from its"):
        explain(per_leaf(make), {"w": struct(64, 64)}, {"w": ("a", "b")}, strict=True)


def test_a_square_decided_by_equality_needs_a_rule() -> None:
    """Of two branches of one shape, symbols take that of unequal sizes."""
    init = per_leaf(lambda p: zeros(p.shape[0] if p.shape[0] == p.shape[1] else p.shape[1], 4))
    assert axes_of(init, struct(64, 64), ("a", "b")) == {".": ("b", None)}
