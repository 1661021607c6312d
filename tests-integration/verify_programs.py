"""Training steps for `verify`: healthy ones, and ones with a fault planted in them.

Each is built for eight devices of any kind, so that the same table serves CPUs and the compilers of
TPUs that need no TPU; `verify_texts.py` stores what these make of it. Nothing here is ever run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from opt_partition import Expected

P = PartitionSpec
Tree = Any
F32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class Meshes:
    """The same eight devices, as the meshes that the programs are written for."""

    devices: Sequence[Any]
    kind: AxisType = AxisType.Auto

    def of(self, **sizes: int) -> Mesh:
        grid = np.array(self.devices).reshape(tuple(sizes.values()))
        return Mesh(grid, tuple(sizes), axis_types=(self.kind,) * len(sizes))

    @property
    def data(self) -> Mesh:
        return self.of(data=8)

    @property
    def grid(self) -> Mesh:
        return self.of(data=4, model=2)

    @property
    def cube(self) -> Mesh:
        return self.of(pod=2, data=2, model=2)


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step with all that `jax.jit` and `verify` need.

    Attributes:
      function: of parameters, state and batch; returns new parameters and new state.
      arguments: abstract.
      inputs: shardings of `arguments`.
      outputs: shardings of the result.
      expected: what is asked of it.
      donate: numbers of the arguments given away.
      mesh: made current while it is traced, where some axes of it are Explicit.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    inputs: tuple[Any, ...]
    outputs: Any
    expected: Expected
    donate: tuple[int, ...] = (0, 1)
    mesh: Mesh | None = None

    def lower(self) -> jax.stages.Lowered:
        explicit = self.mesh is not None and AxisType.Explicit in self.mesh.axis_types
        jitted = jax.jit(
            self.function,
            in_shardings=self.inputs,
            out_shardings=self.outputs,
            donate_argnums=self.donate,
        )
        arguments = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            self.arguments,
            self.inputs,
        )
        with jax.set_mesh(self.mesh) if explicit else contextlib.nullcontext():
            return jitted.lower(*arguments)


@dataclasses.dataclass(frozen=True)
class Program:
    """A row of the tables.

    Attributes:
      name: unique among all programs.
      build: makes the step.
      options: what `verify` gets besides.
      finds: kinds and paths of the errors that `verify` must find; of a healthy step none.
      warns: kinds of warnings that it must find, gradients left aside.
    """

    name: str
    build: Callable[[Meshes], Step]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    finds: frozenset[tuple[str, str | None]] = frozenset()
    warns: frozenset[str] = frozenset()


# Models


def shapes_of(**shapes: tuple[int, ...]) -> Tree:
    return {name: jax.ShapeDtypeStruct(shape, F32) for name, shape in shapes.items()}


PARAMS = shapes_of(w=(256, 512), b=(512,))
BATCH = jax.ShapeDtypeStruct((64, 256), F32)


def dense_loss(params: Tree, batch: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(jnp.tanh(batch @ params["w"] + params["b"])))


LAYERS = shapes_of(w=(8, 256, 256))


def layers_loss(params: Tree, batch: jax.Array, *, remat: bool = False) -> jax.Array:
    """A scan over stacked layers."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    out, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, batch, params["w"])
    return jnp.mean(out)


# Steps

MOMENTUM = optax.sgd(0.1, momentum=0.9)
ROWS = P("data")


def place(tree: Tree, mesh: Mesh, specs: Tree) -> Tree:
    """Shardings of a tree: by the name of the leaf's last key, of anything else whole."""

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        keys = [getattr(key, "key", None) for key in path]
        spec = next((specs[key] for key in reversed(keys) if key in specs), P())
        return NamedSharding(mesh, spec if len(spec) <= len(leaf.shape) else P())

    return jax.tree_util.tree_map_with_path(sharding, tree)


def constrain(tree: Tree, shardings: Tree) -> Tree:
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings)


def same(x: Any) -> Any:
    return x


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a training step is put together.

    Attributes:
      mesh: which of the meshes.
      params: specs of the parameters, by name.
      state: specs of the state, by the name of the parameter; of leaves of other ranks whole.
      tx: the optimizer.
      loss: of parameters and batch.
      shapes: of the parameters.
      batch: its shape.
      batch_spec: its spec.
      before: sees the old state; with the mesh.
      after: sees the new state; with the mesh.
      on_grads: sees the gradients, with the state's shardings of the parameters.
      place_state: shardings of the state instead of `state`'s, of mesh and abstract state.
      out_state: specs of the state that comes out, if they differ.
      out_params: specs of the parameters that come out, if they differ.
      gradients: of loss, parameters and batch, instead of `jax.grad`.
      donate: numbers of the arguments given away.
      update_dtype: what the parameters are cast to before they are updated.
    """

    mesh: str = "data"
    params: Tree = dataclasses.field(default_factory=dict)
    state: Tree = dataclasses.field(default_factory=lambda: {"w": P("data"), "b": P("data")})
    tx: optax.GradientTransformation = MOMENTUM
    loss: Callable[[Tree, Any], jax.Array] = dense_loss
    shapes: Tree = dataclasses.field(default_factory=lambda: PARAMS)
    batch: jax.ShapeDtypeStruct = BATCH
    batch_spec: P = ROWS
    before: Callable[[Tree, Mesh], Tree] = lambda state, mesh: state
    after: Callable[[Tree, Mesh], Tree] = lambda state, mesh: state
    on_grads: Callable[[Tree, Tree], Tree] = lambda grads, shardings: grads
    place_state: Callable[[Mesh, Tree], Tree] | None = None
    out_state: Tree | None = None
    out_params: Tree | None = None
    gradients: Callable[[Any, Tree, Any], Tree] = lambda loss, p, b: jax.grad(loss)(p, b)
    donate: tuple[int, ...] = (0, 1)
    update_dtype: Any = None

    def __call__(self, meshes: Meshes) -> Step:
        mesh = getattr(meshes, self.mesh)
        shapes = jax.eval_shape(self.tx.init, self.shapes)
        params = place(self.shapes, mesh, self.params)
        spread = place(self.shapes, mesh, self.state)
        state = (self.place_state or functools.partial(self._place, self.state))(mesh, shapes)

        def step(values: Tree, opt_state: Tree, batch: Any) -> tuple[Tree, Tree]:
            grads = self.on_grads(self.gradients(self.loss, values, batch), spread)
            updates, new = self.tx.update(grads, self.before(opt_state, mesh), values)
            if self.update_dtype is not None:
                values = optax.tree.cast(values, self.update_dtype)
            return optax.apply_updates(values, updates), self.after(new, mesh)

        out = state if self.out_state is None else self._place(self.out_state, mesh, shapes)
        new = params if self.out_params is None else place(self.shapes, mesh, self.out_params)
        return Step(
            step,
            (self.shapes, shapes, self.batch),
            (params, state, NamedSharding(mesh, self.batch_spec)),
            (new, out),
            Expected((params, state), (params, state)),
            self.donate,
            mesh,
        )

    def _place(self, specs: Tree, mesh: Mesh, shapes: Tree) -> Tree:
        return place(shapes, mesh, specs)


def by_shape(specs: dict[tuple[int, ...], P]) -> Callable[[Mesh, Tree], Tree]:
    """Shardings of a state by the shapes of its leaves."""
    return lambda mesh, shapes: jax.tree.map(
        lambda leaf: NamedSharding(mesh, specs.get(leaf.shape, P())), shapes
    )


def both(params: Tree, **more: Any) -> dict[str, Any]:
    """Parameters and state sharded alike."""
    return {"params": params, "state": params, **more}


# Ways to move a sharded array and to bring it back, each as wasteful as the next


def whole(x: jax.Array, mesh: Mesh) -> jax.Array:
    """`x`, in full on every device; hidden from XLA's simplifications."""
    kept = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P()))
    return jax.lax.optimization_barrier(kept)


def laid(x: jax.Array, mesh: Mesh, *spec: Any) -> jax.Array:
    kept = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))
    return jax.lax.optimization_barrier(kept)


def by_gather(x: jax.Array, mesh: Mesh) -> jax.Array:
    return whole(x, mesh)


def by_low_precision_gather(x: jax.Array, mesh: Mesh) -> jax.Array:
    return whole(x.astype(jnp.bfloat16), mesh).astype(x.dtype)


def by_halves(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Columns, as the rows are divided."""
    return jnp.concatenate([whole(half, mesh) for half in jnp.split(x, 2, axis=-1)], -1)


def by_quarters(x: jax.Array, mesh: Mesh) -> jax.Array:
    return jnp.concatenate([whole(part, mesh) for part in jnp.split(x, 4, axis=-1)], -1)


def by_all_to_all(x: jax.Array, mesh: Mesh) -> jax.Array:
    """To another dimension and back."""
    return laid(laid(x, mesh, None, "data"), mesh, "data")


def by_loop(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Layer by layer."""
    return jax.lax.map(lambda layer: whole(layer, mesh), x)


def by_counted_loop(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Layer by layer, each written back in its place."""

    def one(n: jax.Array, x: jax.Array) -> jax.Array:
        layer = jax.lax.dynamic_index_in_dim(x, n, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(x, whole(layer, mesh), n, 0)

    return jax.lax.fori_loop(0, x.shape[0], one, x)


def on_shards(
    function: Callable[[jax.Array], jax.Array], *spec: Any
) -> Callable[[jax.Array, Mesh], jax.Array]:
    """A move written for the part of an array that a device has along `data`."""

    def move(x: jax.Array, mesh: Mesh) -> jax.Array:
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=P(*spec), out_specs=P(*spec), check_vma=False
        )
        return mapped(x)

    return move


def _mine(full: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(full, jax.lax.axis_index("data") * size, size)


RING = [(n, (n + 1) % 8) for n in range(8)]
BACK = [(after, n) for n, after in RING]


def _ring(part: jax.Array) -> jax.Array:
    """Every shard passes by every device."""
    parts = [part]
    for _ in range(7):
        parts.append(jax.lax.ppermute(parts[-1], "data", RING))
    return jax.lax.optimization_barrier(jnp.stack(parts))[0]


def _ring_loop(part: jax.Array) -> jax.Array:
    """The same in a loop, put together on the way."""

    def turn(n: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        full, passing = carry
        passing = jax.lax.ppermute(passing, "data", RING)
        start = (jax.lax.axis_index("data") - n - 1) % 8 * part.shape[0]
        return jax.lax.dynamic_update_slice_in_dim(full, passing, start, 0), passing

    full = jnp.zeros((8 * part.shape[0], *part.shape[1:]), part.dtype)
    full = jax.lax.dynamic_update_slice_in_dim(
        full, part, jax.lax.axis_index("data") * part.shape[0], 0
    )
    return _mine(jax.lax.fori_loop(0, 7, turn, (full, part))[0], part.shape[0])


def _neighbour(part: jax.Array) -> jax.Array:
    """To the next device and back."""
    there = jax.lax.optimization_barrier(jax.lax.ppermute(part, "data", RING))
    return jax.lax.ppermute(there, "data", BACK)


def _placed_sum(part: jax.Array) -> jax.Array:
    """Each puts its shard into zeros; the sum is the whole."""
    zeros = jnp.zeros((8 * part.shape[0], *part.shape[1:]), part.dtype)
    start = jax.lax.axis_index("data") * part.shape[0]
    full = jax.lax.dynamic_update_slice_in_dim(zeros, part, start, 0)
    return _mine(jax.lax.optimization_barrier(jax.lax.psum(full, "data")), part.shape[0])


def _padded_sum(part: jax.Array) -> jax.Array:
    """The same with a pad, which always puts the shard first, and a roll."""
    full = jnp.pad(part, ((0, 7 * part.shape[0]), (0, 0)))
    full = jnp.roll(full, jax.lax.axis_index("data") * part.shape[0], 0)
    return _mine(jax.lax.optimization_barrier(jax.lax.psum(full, "data")), part.shape[0])


def _masked_sum(part: jax.Array) -> jax.Array:
    """The same with a mask over copies of the shard."""
    mine = jnp.arange(8)[:, None, None] == jax.lax.axis_index("data")
    full = jnp.where(mine, part[None], 0.0).reshape(-1, part.shape[1])
    return _mine(jax.lax.optimization_barrier(jax.lax.psum(full, "data")), part.shape[0])


def _scattered_sum(part: jax.Array) -> jax.Array:
    """The same with indices."""
    rows = jax.lax.axis_index("data") * part.shape[0] + jnp.arange(part.shape[0])
    full = jnp.zeros((8 * part.shape[0], *part.shape[1:]), part.dtype).at[rows].set(part)
    return _mine(jax.lax.optimization_barrier(jax.lax.psum(full, "data")), part.shape[0])


def _sum_scatter(part: jax.Array) -> jax.Array:
    """Shards put into zeros and summed; each device keeps the part that is its neighbour's."""
    zeros = jnp.zeros((8 * part.shape[0], *part.shape[1:]), part.dtype)
    start = (jax.lax.axis_index("data") + 1) % 8 * part.shape[0]
    full = jax.lax.dynamic_update_slice_in_dim(zeros, part, start, 0)
    moved = jax.lax.psum_scatter(full, "data", tiled=True)
    return jax.lax.ppermute(jax.lax.optimization_barrier(moved), "data", BACK)


def _gather_slices(part: jax.Array) -> jax.Array:
    return _mine(
        jax.lax.optimization_barrier(jax.lax.all_gather(part, "data", tiled=True)), part.shape[0]
    )


def _gather_stacked(part: jax.Array) -> jax.Array:
    full = jax.lax.optimization_barrier(jax.lax.all_gather(part, "data"))
    return jax.lax.dynamic_index_in_dim(full, jax.lax.axis_index("data"), keepdims=False)


def _gather_rows(part: jax.Array) -> jax.Array:
    """Row by row, in a loop."""
    rows = jax.lax.map(lambda row: jax.lax.all_gather(row, "data"), part)
    mine = jax.lax.dynamic_index_in_dim(rows, jax.lax.axis_index("data"), 1, keepdims=False)
    return jax.lax.optimization_barrier(mine)


def _gather_pairs(part: jax.Array) -> jax.Array:
    """Among four devices, then among two."""
    fours = [[0, 1, 2, 3], [4, 5, 6, 7]]
    twos = [[n, n + 4] for n in range(4)]
    full = jax.lax.all_gather(part, "data", axis_index_groups=fours, tiled=True)
    full = jax.lax.all_gather(full, "data", axis_index_groups=twos, tiled=True)
    return _mine(jax.lax.optimization_barrier(full), part.shape[0])


def _exchange(part: jax.Array) -> jax.Array:
    """To other columns of all rows, and back."""
    there = jax.lax.all_to_all(part, "data", 1, 0, tiled=True)
    there = jax.lax.optimization_barrier(there)
    return jax.lax.all_to_all(there, "data", 0, 1, tiled=True)


def _gather_while(part: jax.Array) -> jax.Array:
    """As often as a value says: nobody knows how often."""

    def again(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, left = carry
        return _gather_slices(x), left / 2

    start = (part, jax.lax.pmax(jnp.max(part), "data"))
    return jax.lax.while_loop(lambda carry: carry[1] > 1, again, start)[0]


def _gather_if(part: jax.Array) -> jax.Array:
    large = jax.lax.pmax(jnp.max(part), "data") > 1
    return jax.lax.cond(large, _gather_slices, lambda x: x, part)


def each_layer(
    function: Callable[[jax.Array], jax.Array],
) -> Callable[[jax.Array, Mesh], jax.Array]:
    """A move of the parts that a device has of each of the stacked layers, one after the other."""
    return on_shards(lambda parts: jax.lax.map(function, parts), None, "data")


MOVES: dict[str, Callable[[jax.Array, Mesh], jax.Array]] = {
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
LAYER_MOVES: dict[str, Callable[[jax.Array, Mesh], jax.Array]] = {
    "loop": by_loop,
    "counted_loop": by_counted_loop,
    "gather_slices": each_layer(_gather_slices),
    "gather_stacked": each_layer(_gather_stacked),
    "ring": each_layer(_ring),
    "exchange": each_layer(_exchange),
    "placed_sum": each_layer(_placed_sum),
}


def moving(name: str, move: Callable[[jax.Array, Mesh], jax.Array]) -> Callable[[Tree, Mesh], Tree]:
    """What moves the leaves of a state that belong to `name`."""

    def change(state: Tree, mesh: Mesh) -> Tree:
        def one(path: Any, leaf: jax.Array) -> jax.Array:
            named = any(getattr(key, "key", None) == name for key in path)
            return move(leaf, mesh) if named else leaf

        return jax.tree_util.tree_map_with_path(one, state)

    return change


def gathers(*paths: str) -> frozenset[tuple[str, str | None]]:
    return frozenset(("state gather", path) for path in paths)


STATE_W = "1/0/trace/w"


def planted_moves() -> list[Program]:
    """Every move, of the old state and of the new."""
    found = gathers(STATE_W)
    programs = []
    for name, move in MOVES.items():
        for when in ("before", "after"):
            recipe = Recipe(**{when: moving("w", move)})
            programs.append(Program(f"{name}_{when}", recipe, finds=found))
    stacked = {"w": P(None, "data")}
    for name, move in LAYER_MOVES.items():
        for when in ("before", "after"):
            recipe = Recipe(
                shapes=LAYERS, loss=layers_loss, state=stacked, **{when: moving("w", move)}
            )
            programs.append(Program(f"layers_{name}_{when}", recipe, finds=found))
    return programs


# Healthy steps

ADAM = optax.adamw(1e-3)
FSDP = {"w": P("data"), "b": P("data")}
TP = {"w": P(None, "model"), "b": P("model")}
FSDP_TP = {"w": P("data", "model"), "b": P("model")}
FACTORED = optax.adafactor(1e-3, min_dim_size_to_factor=8)
FACTORS = by_shape({(256, 512): P("data"), (512,): P("data"), (256,): P("data")})


def micro_batched(reduce_each: bool) -> Callable[[Any, Tree, Any], Tree]:
    """Gradients over four micro-batches; of each, or of their sum, a part for each device."""

    def gradients(loss: Any, params: Tree, batches: Any) -> Tree:
        def add(total: Tree, batch: Any) -> tuple[Tree, None]:
            grads = jax.grad(loss)(params, batch)
            return jax.tree.map(jnp.add, total, grads), None

        def add_all(total: Tree, batch: Any) -> tuple[Tree, None]:
            return jax.tree.map(
                jnp.add, total, jax.vmap(jax.grad(loss), (None, 0))(params, batch)
            ), None

        if reduce_each:
            return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)[0]
        rows = batches.reshape(batches.shape[0], 8, -1, *batches.shape[2:])
        zeros = jax.tree.map(lambda p: jnp.zeros((8, *p.shape), p.dtype), params)
        return jax.tree.map(lambda g: g.sum(0), jax.lax.scan(add_all, zeros, rows)[0])

    return gradients


def by_hand(
    scatter: Callable[[jax.Array], jax.Array], gather: Callable[[jax.Array], jax.Array]
) -> Callable[[Meshes], Step]:
    """ZeRO-1 under `shard_map`: each device updates its part of the parameters."""

    def build(meshes: Meshes) -> Step:
        mesh, tx = meshes.data, MOMENTUM
        shapes = jax.eval_shape(tx.init, PARAMS)
        params, state = place(PARAMS, mesh, {}), place(shapes, mesh, FSDP)
        batch = NamedSharding(mesh, P("data"))

        def step(values: Tree, opt_state: Tree, data: jax.Array) -> tuple[Tree, Tree]:
            grads = jax.tree.map(scatter, jax.grad(dense_loss)(values, data))
            part = jax.tree.map(lambda p: _mine(p, p.shape[0] // 8), values)
            updates, new = tx.update(grads, opt_state, part)
            return jax.tree.map(gather, optax.apply_updates(part, updates)), new

        specs = jax.tree.map(lambda sharding: sharding.spec, (params, state, batch))
        mapped = jax.shard_map(
            step, mesh=mesh, in_specs=specs, out_specs=specs[:2], check_vma=False
        )
        expected = Expected((params, state), (params, state))
        arguments = (PARAMS, shapes, BATCH)
        return Step(mapped, arguments, (params, state, batch), (params, state), expected, mesh=mesh)

    return build


def sum_scatter(grad: jax.Array) -> jax.Array:
    return jax.lax.psum_scatter(grad, "data", tiled=True)


def sum_and_slice(grad: jax.Array) -> jax.Array:
    return _mine(jax.lax.psum(grad, "data"), grad.shape[0] // 8)


def all_gather(part: jax.Array) -> jax.Array:
    return jax.lax.all_gather(part, "data", tiled=True)


def ring_gather(part: jax.Array) -> jax.Array:
    """An all-gather as a ring of permutes, as it is written to overlap with other work."""
    parts = [part]
    for _ in range(7):
        parts.append(jax.lax.ppermute(parts[-1], "data", RING))
    stacked = jnp.concatenate(parts[::-1])
    return jnp.roll(stacked, (jax.lax.axis_index("data") + 1) * part.shape[0], 0)


def ring_gather_in_a_loop(part: jax.Array) -> jax.Array:
    def turn(n: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        full, passing = carry
        passing = jax.lax.ppermute(passing, "data", RING)
        start = (jax.lax.axis_index("data") - n - 1) % 8 * part.shape[0]
        return jax.lax.dynamic_update_slice_in_dim(full, passing, start, 0), passing

    full = jnp.zeros((8 * part.shape[0], *part.shape[1:]), part.dtype)
    start = jax.lax.axis_index("data") * part.shape[0]
    full = jax.lax.dynamic_update_slice_in_dim(full, part, start, 0)
    return jax.lax.fori_loop(0, 7, turn, (full, part))[0]


def placed_gather(part: jax.Array) -> jax.Array:
    full = jnp.zeros((8 * part.shape[0], *part.shape[1:]), part.dtype)
    start = jax.lax.axis_index("data") * part.shape[0]
    return jax.lax.psum(jax.lax.dynamic_update_slice_in_dim(full, part, start, 0), "data")


def several_steps(recipe: Recipe, unroll: int = 1) -> Callable[[Meshes], Step]:
    """Three steps of a recipe in one program."""

    def build(meshes: Meshes) -> Step:
        one = recipe(meshes)

        def steps(params: Tree, state: Tree, batches: jax.Array) -> tuple[Tree, Tree]:
            def body(carry: tuple[Tree, Tree], batch: jax.Array) -> tuple[tuple[Tree, Tree], None]:
                new = one.function(*carry, batch)
                return tuple(map(constrain, new, one.outputs)), None  # type: ignore[return-value]

            return jax.lax.scan(body, (params, state), batches, unroll=unroll)[0]

        params, state, batch = one.arguments
        batches = jax.ShapeDtypeStruct((3, *batch.shape), batch.dtype)
        spec = NamedSharding(one.inputs[2].mesh, P(None, *one.inputs[2].spec))
        return dataclasses.replace(
            one,
            function=steps,
            arguments=(params, state, batches),
            inputs=(*one.inputs[:2], spec),
        )

    return build


MOE = shapes_of(router=(256, 8), up=(8, 256, 512), down=(8, 512, 256))
EXPERTS = {"up": P("data"), "down": P("data")}


def moe_loss(params: Tree, batch: jax.Array) -> jax.Array:
    """Tokens go to experts on other devices and back."""
    tokens = batch.reshape(8, -1, batch.shape[-1])
    gates = jax.nn.softmax(tokens @ params["router"])
    dispatched = jnp.einsum("gte,gtd->egtd", gates, tokens)
    hidden = jnp.tanh(jnp.einsum("egtd,edf->egtf", dispatched, params["up"]))
    out = jnp.einsum("egtf,efd->egtd", hidden, params["down"])
    return jnp.mean(jnp.square(out.sum(0)))


DECODER = shapes_of(
    embed=(512, 256), qkv=(4, 256, 768), out=(4, 256, 256), up=(4, 256, 512), down=(4, 512, 256)
)
DECODER_TP = {
    "embed": P(None, "model"),
    "qkv": P(None, "data", "model"),
    "out": P(None, "model", "data"),
    "up": P(None, "data", "model"),
    "down": P(None, "model", "data"),
}
DECODER_ZERO = {
    "embed": P("data"),
    "qkv": P(None, "data"),
    "out": P(None, "data"),
    "up": P(None, "data"),
    "down": P(None, "data"),
}
TOKENS = jax.ShapeDtypeStruct((8, 8), jnp.int32)


def decoder_loss(params: Tree, tokens: jax.Array, *, remat: bool = True) -> jax.Array:
    """A decoder of four scanned, rematerialised layers with tied embeddings."""

    def layer(x: jax.Array, p: Tree) -> tuple[jax.Array, None]:
        q, k, v = jnp.split(x @ p["qkv"], 3, -1)
        attended = jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v
        x = x + attended @ p["out"]
        return x + jnp.tanh(x @ p["up"]) @ p["down"], None

    x = params["embed"][tokens]
    layers = {name: p for name, p in params.items() if name != "embed"}
    x, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, layers)
    logits = jax.nn.log_softmax(x @ params["embed"].T)
    return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None], -1))


def decoder(**more: Any) -> Recipe:
    arguments = {"shapes": DECODER, "loss": decoder_loss, "batch": TOKENS, "tx": ADAM, **more}
    return Recipe(**arguments)


def by_layer(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Updates stacked layers one after the other, as is done to save memory."""

    def update(grads: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        def one(_: None, layer: tuple[Tree, ...]) -> tuple[None, tuple[Tree, Tree]]:
            grad, trace, param = layer
            updates, (new, *_) = tx.update(
                grad, (optax.TraceState(trace), optax.EmptyState()), param
            )
            return None, (updates, new.trace)

        _, (updates, trace) = jax.lax.scan(one, None, (grads, state[0].trace, params))
        return updates, (optax.TraceState(trace), optax.EmptyState())

    return optax.GradientTransformation(tx.init, update)


def param_shaped(tx: optax.GradientTransformation, **more: Any) -> Recipe:
    return Recipe(tx=tx, **more)


def clipped(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def multi_steps(every: int) -> optax.GradientTransformation:
    return optax.MultiSteps(ADAM, every).gradient_transformation()


GROUPS = optax.partition({"matrix": ADAM, "rest": MOMENTUM}, {"w": "matrix", "b": "rest"})
BF16 = {name: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16) for name, leaf in PARAMS.items()}
ON_GRADS = constrain


def healthy(name: str, build: Callable[[Meshes], Step], **more: Any) -> Program:
    return Program(name, build, **more)


ANY = {"state_gathers": "any"}
HEALTHY: list[Program] = [
    healthy("replicated", Recipe(tx=ADAM, state={})),
    healthy("zero1_adamw", Recipe(tx=ADAM)),
    healthy("zero1_momentum", Recipe()),
    healthy("zero1_lion", Recipe(tx=optax.lion(1e-3))),
    healthy("zero1_lamb", Recipe(tx=optax.lamb(1e-3))),
    healthy("zero1_clipped", Recipe(tx=clipped(ADAM))),
    healthy("zero1_clipped_by_unit", Recipe(tx=optax.chain(optax.adaptive_grad_clip(0.1), ADAM))),
    healthy("zero1_columns", Recipe(tx=ADAM, state={"w": P(None, "data"), "b": P("data")})),
    healthy("zero1_bf16_params", Recipe(tx=optax.adamw(1e-3, mu_dtype=F32), shapes=BF16)),
    healthy("zero1_injected", Recipe(tx=optax.inject_hyperparams(optax.adamw)(1e-3))),
    healthy("zero1_schedule", Recipe(tx=optax.adamw(optax.cosine_decay_schedule(1e-3, 100)))),
    healthy("zero1_ema_of_updates", Recipe(tx=optax.chain(ADAM, optax.ema(0.9)))),
    healthy("zero1_groups", Recipe(tx=GROUPS)),
    healthy("zero1_masked", Recipe(tx=optax.masked(ADAM, {"w": True, "b": False}))),
    healthy("zero1_finite", Recipe(tx=optax.apply_if_finite(ADAM, 3))),
    healthy("zero1_schedule_free", Recipe(tx=optax.contrib.schedule_free_adamw(1e-3))),
    healthy("zero1_over_tp", Recipe("grid", TP, {"w": P("data", "model"), "b": P("model")}, ADAM)),
    healthy(
        "zero1_over_tp_order",
        Recipe("grid", TP, {"w": P(None, ("model", "data")), "b": P(("model", "data"))}, ADAM),
    ),
    healthy(
        "zero1_over_tp_other_order",
        Recipe("grid", TP, {"w": P(None, ("data", "model")), "b": P(("data", "model"))}, ADAM),
    ),
    healthy("zero1_two_axes", Recipe("grid", {}, {"w": P("data", "model"), "b": P("data")}, ADAM)),
    healthy(
        "zero1_both_axes", Recipe("grid", {}, {"w": P(("data", "model")), "b": P("data")}, ADAM)
    ),
    healthy(
        "zero1_other_dimension",
        Recipe("grid", {"w": P("model")}, {"w": P("data", "model"), "b": P("data")}, ADAM),
    ),
    healthy(
        "zero1_pods",
        Recipe(
            "cube",
            {"w": P("data", "model")},
            {"w": P(("data", "pod"), "model"), "b": P("pod")},
            ADAM,
            batch_spec=P(("pod", "data")),
        ),
    ),
    healthy("zero1_scatter_and_gather", by_hand(sum_scatter, all_gather)),
    healthy("zero1_sum_and_gather", by_hand(sum_and_slice, all_gather)),
    healthy("zero1_ring", by_hand(sum_scatter, ring_gather)),
    healthy("zero1_ring_in_a_loop", by_hand(sum_scatter, ring_gather_in_a_loop)),
    healthy("zero1_placed_sum", by_hand(sum_scatter, placed_gather)),
    healthy(
        "zero1_layers",
        Recipe(shapes=LAYERS, loss=layers_loss, tx=ADAM, state={"w": P(None, "data")}),
    ),
    healthy(
        "zero1_layers_on_devices",
        Recipe(shapes=LAYERS, loss=layers_loss, tx=ADAM, state={"w": P("data")}),
    ),
    healthy(
        "zero1_layer_by_layer",
        Recipe(
            shapes=LAYERS,
            loss=layers_loss,
            tx=by_layer(MOMENTUM),
            state={"w": P(None, "data")},
        ),
    ),
    healthy("zero2_adamw", Recipe(tx=ADAM, on_grads=constrain)),
    healthy(
        "zero2_layers",
        Recipe(
            shapes=LAYERS,
            loss=layers_loss,
            tx=ADAM,
            state={"w": P(None, "data")},
            on_grads=constrain,
        ),
    ),
    healthy("fsdp_adamw", Recipe(tx=ADAM, **both(FSDP))),
    healthy("fsdp_clipped", Recipe(tx=clipped(ADAM), **both(FSDP))),
    healthy("fsdp_lamb", Recipe(tx=optax.lamb(1e-3), **both(FSDP))),
    healthy(
        "fsdp_layers",
        Recipe(shapes=LAYERS, loss=layers_loss, tx=ADAM, **both({"w": P(None, "data")})),
    ),
    healthy(
        "fsdp_layers_remat",
        Recipe(
            shapes=LAYERS,
            loss=functools.partial(layers_loss, remat=True),
            tx=ADAM,
            **both({"w": P(None, None, "data")}),
        ),
    ),
    healthy(
        "fsdp_layers_on_devices",
        Recipe(shapes=LAYERS, loss=layers_loss, tx=ADAM, **both({"w": P("data")})),
    ),
    healthy("fsdp_tp_adamw", Recipe("grid", tx=ADAM, **both(FSDP_TP))),
    healthy("fsdp_tp_clipped", Recipe("grid", tx=clipped(ADAM), **both(FSDP_TP))),
    healthy("fsdp_pods", Recipe("cube", tx=ADAM, **both({"w": P(("pod", "data"), "model")}))),
    healthy(
        "hsdp",
        Recipe("cube", tx=ADAM, batch_spec=P(("pod", "data")), **both({"w": P("data", "model")})),
    ),
    healthy("tp_adamw", Recipe("grid", tx=ADAM, **both(TP))),
    healthy("zero1_multi_steps", Recipe(tx=multi_steps(3))),
    healthy("zero1_multi_steps_every_step", Recipe(tx=multi_steps(1))),
    healthy("fsdp_multi_steps", Recipe(tx=multi_steps(3), **both(FSDP))),
    healthy("zero1_multi_steps_finite", Recipe(tx=optax.apply_if_finite(multi_steps(2), 3))),
    healthy(
        "zero1_micro_batches",
        Recipe(
            tx=ADAM,
            batch=jax.ShapeDtypeStruct((4, 64, 256), F32),
            batch_spec=P(None, "data"),
            gradients=micro_batched(True),
        ),
    ),
    healthy(
        "zero1_micro_batches_deferred",
        Recipe(
            tx=ADAM,
            batch=jax.ShapeDtypeStruct((4, 64, 256), F32),
            batch_spec=P(None, "data"),
            gradients=micro_batched(False),
        ),
    ),
    healthy("adafactor_zero1", Recipe(tx=FACTORED, place_state=FACTORS)),
    healthy(
        "adafactor_fsdp_tp",
        Recipe(
            "grid",
            FSDP_TP,
            tx=FACTORED,
            place_state=by_shape(
                {(256, 512): P("data", "model"), (256,): P("data"), (512,): P("model")}
            ),
        ),
    ),
    healthy(
        "adafactor_momentum",
        Recipe(
            tx=optax.adafactor(1e-3, min_dim_size_to_factor=8, momentum=0.9), place_state=FACTORS
        ),
    ),
    healthy("sm3", Recipe(tx=optax.sm3(0.1), place_state=FACTORS)),
    healthy(
        "muon",
        Recipe(
            "grid",
            FSDP_TP,
            tx=optax.contrib.muon(1e-3),
            place_state=by_shape({(256, 512): P("data", "model"), (512,): P("model")}),
        ),
        options=ANY,
    ),
    healthy("muon_replicated", Recipe(tx=optax.contrib.muon(1e-3), state={})),
    healthy(
        "lbfgs",
        Recipe(
            tx=optax.lbfgs(linesearch=None, memory_size=3),
            params=FSDP,
            place_state=by_shape(
                {
                    (256, 512): P("data"),
                    (512,): P("data"),
                    (3, 256, 512): P(None, "data"),
                    (3, 512): P(None, "data"),
                }
            ),
        ),
    ),
    healthy(
        "fsdp_transposed",
        Recipe("grid", {"w": P("data", "model")}, {"w": P("model", "data")}, ADAM),
    ),
    healthy("fsdp_other_axes", Recipe("grid", {"w": P("model")}, {"w": P("data", "model")}, ADAM)),
    healthy(
        "fsdp_other_order",
        Recipe("grid", {"w": P(("model", "data"))}, {"w": P(("data", "model"))}, ADAM),
    ),
    healthy(
        "fsdp_other_dimension",
        Recipe(
            "cube", {"w": P(("pod", "data"), "model")}, {"w": P("model", ("data", "pod"))}, ADAM
        ),
    ),
    healthy("moe", Recipe(shapes=MOE, loss=moe_loss, tx=ADAM, **both(EXPERTS))),
    healthy(
        "moe_zero1",
        Recipe(
            "grid",
            {"up": P("data"), "down": P("data")},
            {"up": P("data", "model"), "down": P("data", "model"), "router": P("data")},
            ADAM,
            loss=moe_loss,
            shapes=MOE,
        ),
    ),
    healthy("decoder_fsdp_tp", decoder(mesh="grid", **both(DECODER_TP))),
    healthy("decoder_zero1", decoder(state=DECODER_ZERO)),
    healthy("decoder_zero2", decoder(state=DECODER_ZERO, on_grads=constrain)),
    healthy(
        "decoder_adafactor",
        decoder(
            mesh="grid",
            params=DECODER_TP,
            tx=FACTORED,
            place_state=by_shape({(512, 256): P(None, "model"), (256,): P("model")}),
        ),
    ),
    healthy("several_steps_fsdp", several_steps(Recipe(tx=ADAM, **both(FSDP)))),
    healthy("several_steps_zero1", several_steps(Recipe(tx=ADAM))),
    healthy(
        "several_steps_layer_by_layer",
        several_steps(
            Recipe(
                shapes=LAYERS,
                loss=layers_loss,
                tx=by_layer(MOMENTUM),
                state={"w": P(None, "data")},
            )
        ),
    ),
]


# Faulty steps


def whole_update(mesh_name: str = "data") -> Callable[[Meshes], Step]:
    """Adam whose update is computed in full on every device, from moments gathered for it."""

    def build(meshes: Meshes) -> Step:
        mesh = getattr(meshes, mesh_name)

        def update(grads: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
            mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state[0], grads)
            nu = jax.tree.map(lambda n, g: 0.99 * n + 0.01 * g * g, state[1], grads)

            def full(m: jax.Array, n: jax.Array) -> jax.Array:
                return -0.1 * whole(m, mesh) / (jnp.sqrt(whole(n, mesh)) + 1e-8)

            return jax.tree.map(full, mu, nu), (mu, nu)

        def init(params: Tree) -> Tree:
            return tuple(jax.tree.map(jnp.zeros_like, params) for _ in range(2))

        return Recipe(mesh_name, tx=optax.GradientTransformation(init, update))(meshes)

    return build


def bucketed(params_too: bool) -> Callable[[Meshes], Step]:
    """ZeRO-1 that gathers all parameters in one go; and all moments, too, or not."""

    def build(meshes: Meshes) -> Step:
        mesh, tx = meshes.data, MOMENTUM
        shapes = jax.eval_shape(tx.init, PARAMS)
        params, state = place(PARAMS, mesh, {}), place(shapes, mesh, FSDP)
        batch = NamedSharding(mesh, P("data"))

        def full(parts: Tree) -> Tree:
            leaves, treedef = jax.tree.flatten(parts)
            bucket = jnp.concatenate([leaf.ravel() for leaf in leaves])
            rows = jax.lax.all_gather(bucket, "data")
            ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
            split = jnp.split(rows, ends, axis=1)
            return treedef.unflatten(
                [x.reshape(-1, *leaf.shape[1:]) for x, leaf in zip(split, leaves, strict=True)]
            )

        def step(values: Tree, opt_state: Tree, data: jax.Array) -> tuple[Tree, Tree]:
            if params_too:
                again = jax.lax.optimization_barrier(full(opt_state[0].trace))
                trace = jax.tree.map(lambda t: _mine(t, t.shape[0] // 8), again)
                opt_state = (optax.TraceState(trace), *opt_state[1:])
            grads = jax.tree.map(sum_scatter, jax.grad(dense_loss)(values, data))
            part = jax.tree.map(lambda p: _mine(p, p.shape[0] // 8), values)
            updates, new = tx.update(grads, opt_state, part)
            return full(optax.apply_updates(part, updates)), new

        specs = jax.tree.map(lambda sharding: sharding.spec, (params, state, batch))
        mapped = jax.shard_map(
            step, mesh=mesh, in_specs=specs, out_specs=specs[:2], check_vma=False
        )
        expected = Expected((params, state), (params, state))
        arguments = (PARAMS, shapes, BATCH)
        return Step(mapped, arguments, (params, state, batch), (params, state), expected, mesh=mesh)

    return build


def over(*spec: Any) -> Callable[[jax.Array, Mesh], jax.Array]:
    """A move to another layout, from which XLA has to find the way back by itself."""
    return lambda x, mesh: laid(x, mesh, *spec)


def layer_by_layer(*spec: Any) -> Callable[[jax.Array, Mesh], jax.Array]:
    return lambda x, mesh: jax.lax.map(lambda layer: laid(layer, mesh, *spec), x)


def scaled_gather(state: Tree, mesh: Mesh) -> Tree:
    """The momentum, scaled by a number that depends on itself, gathered."""
    trace = state[0].trace
    size = jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(trace)))
    scaled = {**trace, "w": whole(trace["w"] * (1 + 0 * jnp.tanh(size)), mesh)}
    return (optax.TraceState(scaled), *state[1:])


def cast_state(dtype: Any) -> Callable[[Tree, Mesh], Tree]:
    return moving("w", lambda x, mesh: x.astype(dtype))


def asking(recipe: Recipe, dtype: Any) -> Callable[[Meshes], Step]:
    """A step of whose state another dtype is asked."""

    def build(meshes: Meshes) -> Step:
        step = recipe(meshes)
        asked = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                leaf.shape, dtype if leaf.shape else leaf.dtype, sharding=sharding
            ),
            step.arguments[1],
            step.inputs[1],
        )
        return dataclasses.replace(step, expected=Expected((None, asked), (None, asked)))

    return build


def letting_xla_decide(recipe: Recipe) -> Callable[[Meshes], Step]:
    return lambda meshes: dataclasses.replace(recipe(meshes), outputs=None)


def errors(kind: str, *paths: str) -> frozenset[tuple[str, str | None]]:
    return frozenset((kind, path) for path in paths)


HEALTHY.append(healthy("zero1_bucket", bucketed(False)))
# XLA for TPUs sums the gradients of these in whole, though each device uses a part; so it is said.
SUMMED_BY_TPUS = re.compile("zero1_sum_and_gather|(zero1|fsdp)_layers_on_devices|decoder_zero[12]")
# XLA for TPUs sees that what is gathered only to be sliced need not be gathered.
UNDONE_BY_TPUS = re.compile(
    "gather_before|(halves|quarters|layers_loop|layers_counted_loop)_(before|after)|adam_nu"
    "|(grid|fsdp_tp)_(one_axis|other_axis)|fsdp_tp_after|pods|layers_on_devices|layers_fsdp"
)
STACKED = {"shapes": LAYERS, "loss": layers_loss, "state": {"w": P(None, "data")}}
GRID_ZERO = {"w": P("data", "model"), "b": P("data")}
FAULTY: list[Program] = [
    *planted_moves(),
    # other places in the state
    Program(
        "adam_nu",
        Recipe(tx=ADAM, before=moving("w", MOVES["gather_rows"])),
        finds=gathers("1/0/mu/w", "1/0/nu/w"),
    ),
    Program(
        "bias", Recipe(before=moving("b", MOVES["gather_slices"])), finds=gathers("1/0/trace/b")
    ),
    Program(
        "accumulator",
        Recipe(
            tx=multi_steps(3),
            before=lambda s, mesh: s._replace(
                acc_grads=moving("w", by_all_to_all)(s.acc_grads, mesh)
            ),
        ),
        finds=gathers("1/acc_grads/w"),
    ),
    Program(
        "adafactor_momentum_gathered",
        Recipe(
            tx=optax.adafactor(1e-3, min_dim_size_to_factor=8, momentum=0.9),
            place_state=FACTORS,
            before=lambda s, mesh: jax.tree.map(
                lambda x: MOVES["gather_slices"](x, mesh) if x.shape == (256, 512) else x, s
            ),
        ),
        finds=gathers("1/4/ema/w"),
    ),
    Program("scaled_gather", Recipe(before=scaled_gather), finds=gathers(STATE_W)),
    Program("bucket", bucketed(True), finds=gathers(STATE_W, "1/0/trace/b")),
    Program("whole_update", whole_update(), finds=gathers("1/0/w", "1/0/b", "1/1/w", "1/1/b")),
    # other layouts
    Program(
        "fsdp_before",
        Recipe(**both(FSDP), before=moving("w", by_all_to_all)),
        finds=gathers(STATE_W),
    ),
    Program(
        "fsdp_after", Recipe(**both(FSDP), after=moving("w", by_all_to_all)), finds=gathers(STATE_W)
    ),
    Program(
        "fsdp_there",
        Recipe(**both(FSDP), before=moving("w", over(None, "data"))),
        finds=gathers(STATE_W),
    ),
    Program(
        "grid_one_axis",
        Recipe("grid", {}, GRID_ZERO, before=moving("w", over("data"))),
        finds=gathers(STATE_W),
    ),
    Program(
        "grid_other_axis",
        Recipe("grid", {}, GRID_ZERO, before=moving("w", over(None, "model"))),
        finds=gathers(STATE_W),
    ),
    Program(
        "grid_both_axes",
        Recipe("grid", {}, GRID_ZERO, before=moving("w", over())),
        finds=gathers(STATE_W),
    ),
    Program(
        "grid_swapped",
        Recipe("grid", {}, GRID_ZERO, before=moving("w", over("model", "data"))),
        finds=gathers(STATE_W),
    ),
    Program(
        "fsdp_tp_one_axis",
        Recipe("grid", **both(FSDP_TP), before=moving("w", over(None, "model"))),
        finds=gathers(STATE_W),
    ),
    Program(
        "fsdp_tp_after",
        Recipe("grid", **both(FSDP_TP), after=moving("w", over("data"))),
        finds=gathers(STATE_W),
    ),
    Program(
        "fsdp_tp_order",
        Recipe(
            "grid", **both({"w": P(("data", "model"))}), after=moving("w", over(("model", "data")))
        ),
        finds=gathers(STATE_W),
    ),
    Program(
        "pods",
        Recipe(
            "cube",
            {"w": P("data", "model")},
            {"w": P(("data", "pod"), "model")},
            before=moving("w", over("data", "model")),
        ),
        finds=gathers(STATE_W),
    ),
    # scanned layers
    Program(
        "layers_on_devices",
        Recipe(**{**STACKED, "state": {"w": P("data")}}, before=moving("w", by_gather)),
        finds=gathers(STATE_W),
    ),
    Program(
        "layers_on_devices_one_by_one",
        Recipe(**{**STACKED, "state": {"w": P("data")}}, tx=by_layer(MOMENTUM)),
        finds=gathers(STATE_W),
    ),
    Program(
        "layers_all_to_all",
        Recipe(
            **STACKED,
            before=moving(
                "w", lambda x, mesh: laid(layer_by_layer(None, "data")(x, mesh), mesh, None, "data")
            ),
        ),
        finds=gathers(STATE_W),
    ),
    Program(
        "layers_fsdp",
        Recipe(
            shapes=LAYERS,
            loss=layers_loss,
            **both({"w": P(None, "data")}),
            before=moving("w", layer_by_layer()),
        ),
        finds=gathers(STATE_W),
    ),
    Program(
        "several_steps_gather",
        several_steps(Recipe(before=moving("w", MOVES["gather_slices"]))),
        finds=gathers(STATE_W),
    ),
    Program(
        "several_steps_loop",
        several_steps(Recipe(**STACKED, after=moving("w", LAYER_MOVES["gather_slices"]))),
        finds=gathers(STATE_W),
    ),
    Program(
        "several_steps_all_to_all",
        several_steps(Recipe(**both(FSDP), after=moving("w", by_all_to_all))),
        finds=gathers(STATE_W),
    ),
    Program(
        "decoder_loop",
        decoder(state=DECODER_ZERO, tx=MOMENTUM, before=moving("up", LAYER_MOVES["gather_slices"])),
        finds=gathers("1/0/trace/up"),
    ),
    # not as asked
    Program(
        "comes_out_whole",
        Recipe(out_state={}, donate=()),
        finds=errors("sharding", STATE_W, "1/0/trace/b") | gathers(STATE_W, "1/0/trace/b"),
        warns=frozenset({"donation"}),
    ),
    Program(
        "comes_out_elsewhere",
        Recipe(out_state={"w": P(None, "data"), "b": P("data")}, donate=()),
        finds=errors("sharding", STATE_W) | gathers(STATE_W),
        warns=frozenset({"donation"}),
    ),
    Program(
        "params_come_out_sharded",
        Recipe(out_params=FSDP, donate=()),
        finds=errors("sharding", "0/w", "0/b"),
        warns=frozenset({"donation"}),
    ),
    Program(
        "xla_decides",
        letting_xla_decide(Recipe(donate=())),
        finds=errors("sharding", "0/w", "0/b"),
        warns=frozenset({"donation"}),
    ),
    Program(
        "dtype_changes",
        Recipe(after=cast_state(jnp.bfloat16), donate=(0,)),
        finds=errors("dtype", STATE_W),
        warns=frozenset({"donation"}),
    ),
    Program(
        "dtype_widens",
        Recipe(
            tx=optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.bfloat16),
            after=cast_state(F32),
            donate=(0,),
        ),
        finds=errors("dtype", STATE_W),
        warns=frozenset({"donation"}),
    ),
    Program(
        "dtype_of_params",
        Recipe(shapes=BF16, update_dtype=F32, donate=(1,)),
        finds=errors("dtype", "0/w", "0/b"),
        warns=frozenset({"donation"}),
    ),
    Program(
        "dtype_not_asked",
        asking(Recipe(tx=optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.bfloat16)), F32),
        finds=errors("dtype", STATE_W, "1/0/trace/b"),
    ),
    Program(
        "dtype_asked_for_less",
        asking(Recipe(), jnp.bfloat16),
        finds=errors("dtype", STATE_W, "1/0/trace/b"),
    ),
]
WASTEFUL: list[Program] = [
    Program("not_donated", Recipe(donate=()), warns=frozenset({"donation"})),
    Program("state_not_donated", Recipe(donate=(0,)), warns=frozenset({"donation"})),
    Program("params_not_donated", Recipe(donate=(1,)), warns=frozenset({"donation"})),
]
