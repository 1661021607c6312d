"""How the training steps of `verify`'s tables are put together, for eight devices of any kind."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
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
    """A training step with all that `jax.jit` and `verify` need."""

    function: Callable[..., Any]  # of parameters, state and batch; returns new ones and new state
    arguments: tuple[Any, ...]  # abstract
    inputs: tuple[Any, ...]
    outputs: Any
    expected: Expected
    donate: tuple[int, ...] = (0, 1)
    mesh: Mesh | None = None  # made current while it is traced, where some axes are Explicit

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
    """A row of the tables: what `verify` must find, gradients left aside."""

    name: str
    build: Callable[[Meshes], Step]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    finds: frozenset[tuple[str, str | None]] = frozenset()  # kinds and paths
    warns: frozenset[str] = frozenset()  # kinds


# Models


def shapes_of(**shapes: tuple[int, ...]) -> Tree:
    return {name: jax.ShapeDtypeStruct(shape, F32) for name, shape in shapes.items()}


PARAMS = shapes_of(w=(256, 512), b=(512,))
BATCH = jax.ShapeDtypeStruct((64, 256), F32)


def dense_loss(params: Tree, batch: jax.Array) -> Any:
    return jnp.mean(jnp.square(jnp.tanh(batch @ params["w"] + params["b"])))


LAYERS = shapes_of(w=(8, 256, 256))


def layers_loss(params: Tree, batch: jax.Array, *, remat: bool = False) -> Any:
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


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a training step is put together; specs are by the name of the parameter."""

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


def layers(**more: Any) -> Recipe:
    """A recipe of stacked layers."""
    arguments = {"shapes": LAYERS, "loss": layers_loss, **more}
    return Recipe(**arguments)


# Where arrays move


def whole(x: jax.Array, mesh: Mesh) -> Any:
    """`x`, in full on every device; hidden from XLA's simplifications."""
    kept = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P()))
    return jax.lax.optimization_barrier(kept)


def laid(x: jax.Array, mesh: Mesh, *spec: Any) -> Any:
    kept = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))
    return jax.lax.optimization_barrier(kept)


def mine(full: jax.Array, size: int) -> Any:
    return jax.lax.dynamic_slice_in_dim(full, jax.lax.axis_index("data") * size, size)


RING = [(n, (n + 1) % 8) for n in range(8)]


def moving(name: str, move: Callable[[jax.Array, Mesh], Any]) -> Callable[[Tree, Mesh], Tree]:
    """What moves the leaves of a state that belong to `name`."""

    def change(state: Tree, mesh: Mesh) -> Tree:
        def one(path: Any, leaf: jax.Array) -> Any:
            named = any(getattr(key, "key", None) == name for key in path)
            return move(leaf, mesh) if named else leaf

        return jax.tree_util.tree_map_with_path(one, state)

    return change


# Optimizers, models, and steps that are more than a recipe

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


def _on_each_device(step: Callable[[Tree, Tree, jax.Array], tuple[Tree, Tree]], mesh: Mesh) -> Step:
    """A step under `shard_map`: whole parameters, and the part of the momentum of each device."""
    shapes = jax.eval_shape(MOMENTUM.init, PARAMS)
    params, state = place(PARAMS, mesh, {}), place(shapes, mesh, FSDP)
    shardings = (params, state, NamedSharding(mesh, P("data")))
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[:2], check_vma=False)
    expected = Expected((params, state), (params, state))
    arguments = (PARAMS, shapes, BATCH)
    return Step(mapped, arguments, shardings, (params, state), expected, mesh=mesh)


def by_hand(
    scatter: Callable[[jax.Array], Any], gather: Callable[[jax.Array], Any]
) -> Callable[[Meshes], Step]:
    """ZeRO-1 under `shard_map`: each device updates its part of the parameters."""

    def build(meshes: Meshes) -> Step:
        tx = MOMENTUM

        def step(values: Tree, opt_state: Tree, data: jax.Array) -> tuple[Tree, Tree]:
            grads = jax.tree.map(scatter, jax.grad(dense_loss)(values, data))
            part = jax.tree.map(lambda p: mine(p, p.shape[0] // 8), values)
            updates, new = tx.update(grads, opt_state, part)
            return jax.tree.map(gather, optax.apply_updates(part, updates)), new

        return _on_each_device(step, meshes.data)

    return build


def sum_scatter(grad: jax.Array) -> Any:
    return jax.lax.psum_scatter(grad, "data", tiled=True)


def sum_and_slice(grad: jax.Array) -> Any:
    return mine(jax.lax.psum(grad, "data"), grad.shape[0] // 8)


def gather_and_sum(grad: jax.Array) -> Any:
    """Each device receives the gradients of all eight in full, and sums them."""
    return mine(jax.lax.all_gather(grad, "data").sum(0), grad.shape[0] // 8)


def exchange_and_sum(grad: jax.Array) -> Any:
    """A reduce-scatter by hand, which moves as little."""
    parts = jax.lax.all_to_all(grad.reshape(8, -1, *grad.shape[1:]), "data", 0, 0)
    return parts.sum(0)


def all_gather(part: jax.Array) -> Any:
    return jax.lax.all_gather(part, "data", tiled=True)


def several_steps(recipe: Recipe, unroll: int = 1) -> Callable[[Meshes], Step]:
    """Three steps of a recipe in one program."""

    def build(meshes: Meshes) -> Step:
        one = recipe(meshes)

        def steps(params: Tree, state: Tree, batches: jax.Array) -> tuple[Tree, Tree]:
            def body(carry: tuple[Tree, Tree], batch: jax.Array) -> tuple[tuple[Tree, Tree], None]:
                new = one.function(*carry, batch)
                return tuple(map(constrain, new, one.outputs)), None

            return jax.lax.scan(body, (params, state), batches, unroll=unroll)[0]

        params, state, batch = one.arguments
        batches = jax.ShapeDtypeStruct((3, *batch.shape), batch.dtype)
        spec = NamedSharding(one.inputs[2].mesh, P(None, *one.inputs[2].spec))
        return dataclasses.replace(
            one, function=steps, arguments=(params, state, batches), inputs=(*one.inputs[:2], spec)
        )

    return build


MOE = shapes_of(router=(256, 8), up=(8, 256, 512), down=(8, 512, 256))


def moe_loss(params: Tree, batch: jax.Array) -> Any:
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


def decoder_loss(params: Tree, tokens: jax.Array, *, remat: bool = True) -> Any:
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


def clipped(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def multi_steps(every: int) -> optax.GradientTransformation:
    return optax.MultiSteps(ADAM, every).gradient_transformation()


BF16 = {name: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16) for name, leaf in PARAMS.items()}


def bucketed(params_too: bool) -> Callable[[Meshes], Step]:
    """ZeRO-1 that gathers all parameters in one go; and all moments, too, or not."""

    def build(meshes: Meshes) -> Step:
        tx = MOMENTUM

        def full(parts: Tree) -> Tree:
            leaves, treedef = jax.tree.flatten(parts)
            bucket = jnp.concatenate([leaf.ravel() for leaf in leaves])
            rows = jax.lax.all_gather(bucket, "data")
            ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
            split = jnp.split(rows, ends, axis=1)
            return jax.tree.unflatten(
                treedef,
                [x.reshape(-1, *leaf.shape[1:]) for x, leaf in zip(split, leaves, strict=True)],
            )

        def step(values: Tree, opt_state: Tree, data: jax.Array) -> tuple[Tree, Tree]:
            if params_too:
                again = jax.lax.optimization_barrier(full(opt_state[0].trace))
                trace = jax.tree.map(lambda t: mine(t, t.shape[0] // 8), again)
                opt_state = (optax.TraceState(trace), *opt_state[1:])
            grads = jax.tree.map(sum_scatter, jax.grad(dense_loss)(values, data))
            part = jax.tree.map(lambda p: mine(p, p.shape[0] // 8), values)
            updates, new = tx.update(grads, opt_state, part)
            return full(optax.apply_updates(part, updates)), new

        return _on_each_device(step, meshes.data)

    return build


def over(*spec: Any) -> Callable[[jax.Array, Mesh], Any]:
    """A move to another layout, from which XLA has to find the way back by itself."""
    return lambda x, mesh: laid(x, mesh, *spec)


def cast_state(dtype: Any) -> Callable[[Tree, Mesh], Tree]:
    return moving("w", lambda x, mesh: x.astype(dtype))


def letting_xla_decide(recipe: Recipe) -> Callable[[Meshes], Step]:
    return lambda meshes: dataclasses.replace(recipe(meshes), outputs=None)
