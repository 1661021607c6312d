"""Ways to move a sharded array to other devices and back, each as wasteful as the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from verify_recipes import P, Tree


def whole(x: jax.Array, mesh: Mesh) -> Any:
    """`x`, in full on every device; hidden from XLA's simplifications."""
    kept = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P()))
    return jax.lax.optimization_barrier(kept)


def laid(x: jax.Array, mesh: Mesh, *spec: Any) -> Any:
    kept = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))
    return jax.lax.optimization_barrier(kept)


def by_gather(x: jax.Array, mesh: Mesh) -> Any:
    return whole(x, mesh)


def by_low_precision_gather(x: jax.Array, mesh: Mesh) -> Any:
    return whole(x.astype(jnp.bfloat16), mesh).astype(x.dtype)


def by_halves(x: jax.Array, mesh: Mesh) -> Any:
    """Columns, as the rows are divided."""
    return jnp.concatenate([whole(half, mesh) for half in jnp.split(x, 2, axis=-1)], -1)


def by_quarters(x: jax.Array, mesh: Mesh) -> Any:
    return jnp.concatenate([whole(part, mesh) for part in jnp.split(x, 4, axis=-1)], -1)


def by_all_to_all(x: jax.Array, mesh: Mesh) -> Any:
    """To another dimension and back."""
    return laid(laid(x, mesh, None, "data"), mesh, "data")


def by_loop(x: jax.Array, mesh: Mesh) -> Any:
    """Layer by layer."""
    return jax.lax.map(lambda layer: whole(layer, mesh), x)


def by_counted_loop(x: jax.Array, mesh: Mesh) -> Any:
    """Layer by layer, each written back in its place."""

    def one(n: jax.Array, x: jax.Array) -> Any:
        layer = jax.lax.dynamic_index_in_dim(x, n, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(x, whole(layer, mesh), n, 0)

    return jax.lax.fori_loop(0, x.shape[0], one, x)


def on_shards(function: Callable[[jax.Array], Any], *spec: Any) -> Callable[[jax.Array, Mesh], Any]:
    """A move written for the part of an array that a device has along `data`."""

    def move(x: jax.Array, mesh: Mesh) -> Any:
        mapped: Any = jax.shard_map(
            function, mesh=mesh, in_specs=P(*spec), out_specs=P(*spec), check_vma=False
        )
        return mapped(x)

    return move


def mine(full: jax.Array, size: int) -> Any:
    return jax.lax.dynamic_slice_in_dim(full, jax.lax.axis_index("data") * size, size)


RING = [(n, (n + 1) % 8) for n in range(8)]
BACK = [(after, n) for n, after in RING]


def _ring(part: jax.Array) -> Any:
    """Every shard passes by every device."""
    parts = [part]
    for _ in range(7):
        parts.append(jax.lax.ppermute(parts[-1], "data", RING))
    return jax.lax.optimization_barrier(jnp.stack(parts))[0]


def ring_gather_in_a_loop(part: jax.Array) -> Any:
    """All parts, by a ring in a loop that puts them together on the way."""

    def turn(n: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        full, passing = carry
        passing = jax.lax.ppermute(passing, "data", RING)
        start = (jax.lax.axis_index("data") - n - 1) % 8 * part.shape[0]
        return jax.lax.dynamic_update_slice_in_dim(full, passing, start, 0), passing

    full = jnp.zeros((8 * part.shape[0], *part.shape[1:]), part.dtype)
    start = jax.lax.axis_index("data") * part.shape[0]
    full = jax.lax.dynamic_update_slice_in_dim(full, part, start, 0)
    return jax.lax.fori_loop(0, 7, turn, (full, part))[0]


def _ring_loop(part: jax.Array) -> Any:
    return mine(ring_gather_in_a_loop(part), part.shape[0])


def _neighbour(part: jax.Array) -> Any:
    """To the next device and back."""
    there = jax.lax.optimization_barrier(jax.lax.ppermute(part, "data", RING))
    return jax.lax.ppermute(there, "data", BACK)


def _placed_sum(part: jax.Array) -> Any:
    """Each puts its shard into zeros; the sum is the whole."""
    zeros = jnp.zeros((8 * part.shape[0], *part.shape[1:]), part.dtype)
    start = jax.lax.axis_index("data") * part.shape[0]
    full = jax.lax.dynamic_update_slice_in_dim(zeros, part, start, 0)
    return mine(jax.lax.optimization_barrier(jax.lax.psum(full, "data")), part.shape[0])


def _padded_sum(part: jax.Array) -> Any:
    """The same with a pad, which always puts the shard first, and a roll."""
    full = jnp.pad(part, ((0, 7 * part.shape[0]), (0, 0)))
    full = jnp.roll(full, jax.lax.axis_index("data") * part.shape[0], 0)
    return mine(jax.lax.optimization_barrier(jax.lax.psum(full, "data")), part.shape[0])


def _masked_sum(part: jax.Array) -> Any:
    """The same with a mask over copies of the shard."""
    is_mine = jnp.arange(8)[:, None, None] == jax.lax.axis_index("data")
    full = jnp.where(is_mine, part[None], 0.0).reshape(-1, part.shape[1])
    return mine(jax.lax.optimization_barrier(jax.lax.psum(full, "data")), part.shape[0])


def _scattered_sum(part: jax.Array) -> Any:
    """The same with indices."""
    rows = jax.lax.axis_index("data") * part.shape[0] + jnp.arange(part.shape[0])
    full = jnp.zeros((8 * part.shape[0], *part.shape[1:]), part.dtype).at[rows].set(part)
    return mine(jax.lax.optimization_barrier(jax.lax.psum(full, "data")), part.shape[0])


def _sum_scatter(part: jax.Array) -> Any:
    """Shards put into zeros and summed; each device keeps the part that is its neighbour's."""
    zeros = jnp.zeros((8 * part.shape[0], *part.shape[1:]), part.dtype)
    start = (jax.lax.axis_index("data") + 1) % 8 * part.shape[0]
    full = jax.lax.dynamic_update_slice_in_dim(zeros, part, start, 0)
    moved = jax.lax.psum_scatter(full, "data", tiled=True)
    return jax.lax.ppermute(jax.lax.optimization_barrier(moved), "data", BACK)


def _gather_slices(part: jax.Array) -> Any:
    return mine(
        jax.lax.optimization_barrier(jax.lax.all_gather(part, "data", tiled=True)), part.shape[0]
    )


def _gather_stacked(part: jax.Array) -> Any:
    full = jax.lax.optimization_barrier(jax.lax.all_gather(part, "data"))
    return jax.lax.dynamic_index_in_dim(full, jax.lax.axis_index("data"), keepdims=False)


def _gather_rows(part: jax.Array) -> Any:
    """Row by row, in a loop."""
    rows = jax.lax.map(lambda row: jax.lax.all_gather(row, "data"), part)
    mine = jax.lax.dynamic_index_in_dim(rows, jax.lax.axis_index("data"), 1, keepdims=False)
    return jax.lax.optimization_barrier(mine)


def _gather_pairs(part: jax.Array) -> Any:
    """Among four devices, then among two."""
    fours = [[0, 1, 2, 3], [4, 5, 6, 7]]
    twos = [[n, n + 4] for n in range(4)]
    full = jax.lax.all_gather(part, "data", axis_index_groups=fours, tiled=True)
    full = jax.lax.all_gather(full, "data", axis_index_groups=twos, tiled=True)
    return mine(jax.lax.optimization_barrier(full), part.shape[0])


def _exchange(part: jax.Array) -> Any:
    """To other columns of all rows, and back."""
    there = jax.lax.all_to_all(part, "data", 1, 0, tiled=True)
    there = jax.lax.optimization_barrier(there)
    return jax.lax.all_to_all(there, "data", 0, 1, tiled=True)


def _gather_while(part: jax.Array) -> Any:
    """As often as a value says: nobody knows how often."""

    def again(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, left = carry
        return _gather_slices(x), left / 2

    start = (part, jax.lax.pmax(jnp.max(part), "data"))
    return jax.lax.while_loop(lambda carry: carry[1] > 1, again, start)[0]


def _gather_if(part: jax.Array) -> Any:
    large = jax.lax.pmax(jnp.max(part), "data") > 1
    return jax.lax.cond(large, _gather_slices, lambda x: x, part)


def by_masked_layers(x: jax.Array, mesh: Mesh) -> Any:
    """Layer by layer; what is new is put in its place by a mask, and not at an index."""

    def layer(number: Any, moments: jax.Array) -> Any:
        new = laid(jnp.sin(whole(moments[number], mesh)), mesh, "data")
        return jnp.where((jnp.arange(len(x)) == number)[:, None, None], new[None], moments)

    return laid(jax.lax.fori_loop(0, len(x), layer, x), mesh, None, "data")


def each_layer(function: Callable[[jax.Array], Any]) -> Callable[[jax.Array, Mesh], Any]:
    """A move of the parts that a device has of each of the stacked layers, one after the other."""
    return on_shards(lambda parts: jax.lax.map(function, parts), None, "data")


MOVES: dict[str, Callable[[jax.Array, Mesh], Any]] = {
    "gather": by_gather,
    "bf16_gather": by_low_precision_gather,
    "halves": by_halves,
    "quarters": by_quarters,
    "all_to_all": by_all_to_all,
    "ring": on_shards(_ring, "data"),
    "ring_in_a_loop": on_shards(_ring_loop, "data"),
    "neighbour": on_shards(_neighbour, "data"),
    "placed_sum": on_shards(_placed_sum, "data"),
    "padded_sum": on_shards(_padded_sum, "data"),
    "masked_sum": on_shards(_masked_sum, "data"),
    "scattered_sum": on_shards(_scattered_sum, "data"),
    "sum_scatter": on_shards(_sum_scatter, "data"),
    "gather_slices": on_shards(_gather_slices, "data"),
    "gather_stacked": on_shards(_gather_stacked, "data"),
    "gather_rows": on_shards(_gather_rows, "data"),
    "gather_in_two_stages": on_shards(_gather_pairs, "data"),
    "exchange": on_shards(_exchange, "data"),
    "gather_while": on_shards(_gather_while, "data"),
    "gather_if": on_shards(_gather_if, "data"),
}
LAYER_MOVES: dict[str, Callable[[jax.Array, Mesh], Any]] = {
    "loop": by_loop,
    "counted_loop": by_counted_loop,
    "gather_slices": each_layer(_gather_slices),
    "gather_stacked": each_layer(_gather_stacked),
    "ring": each_layer(_ring),
    "exchange": each_layer(_exchange),
    "placed_sum": each_layer(_placed_sum),
}


def _average(part: jax.Array) -> Any:
    """Each device's shard becomes the mean of all shards."""
    return jax.lax.pmean(part, "data")


def _average_halves(part: jax.Array) -> Any:
    return jnp.concatenate([_average(half) for half in jnp.split(part, 2, -1)], -1)


def _average_copies(part: jax.Array) -> Any:
    """The same: each device keeps the sum of a copy of each shard."""
    return jax.lax.psum_scatter(jnp.stack([part] * 8), "data") / 8


def _average_rows(part: jax.Array) -> Any:
    return jax.lax.map(_average, part)


def _average_often(part: jax.Array) -> Any:
    return jax.lax.fori_loop(0, 3, lambda _, x: _average(x), part)


def _average_if(part: jax.Array) -> Any:
    large = jax.lax.pmax(jnp.max(part), "data") > 1
    return jax.lax.cond(large, _average, lambda x: x, part)


REDUCTIONS: dict[str, Callable[[jax.Array, Mesh], Any]] = {
    "average": on_shards(_average, "data"),
    "average_halves": on_shards(_average_halves, "data"),
    "average_copies": on_shards(_average_copies, "data"),
    "average_rows": on_shards(_average_rows, "data"),
    "average_often": on_shards(_average_often, "data"),
    "average_if": on_shards(_average_if, "data"),
    "maximum": on_shards(lambda part: jax.lax.pmax(part, "data"), "data"),
}
LAYER_REDUCTIONS = {"average": each_layer(_average)}


def moving(name: str, move: Callable[[jax.Array, Mesh], Any]) -> Callable[[Tree, Mesh], Tree]:
    """What moves the leaves of a state that belong to `name`."""

    def change(state: Tree, mesh: Mesh) -> Tree:
        def one(path: Any, leaf: jax.Array) -> Any:
            named = any(getattr(key, "key", None) == name for key in path)
            return move(leaf, mesh) if named else leaf

        return jax.tree_util.tree_map_with_path(one, state)

    return change
