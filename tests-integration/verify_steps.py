"""Optimizers, models and training steps of `verify`'s tables that are more than a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from opt_partition import Expected
from verify_moves import RING, laid, mine, moving, whole
from verify_recipes import (
    BATCH,
    MOMENTUM,
    PARAMS,
    Meshes,
    P,
    Recipe,
    Step,
    Tree,
    by_shape,
    constrain,
    dense_loss,
    place,
    shapes_of,
)

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


def gather_and_add(grad: jax.Array) -> Any:
    first, *others = jnp.split(jax.lax.all_gather(grad, "data", tiled=True), 8)
    return mine(sum(others, start=first), grad.shape[0] // 8)


def gather_halves_and_sum(grad: jax.Array) -> Any:
    halves = jnp.split(grad, 2, -1)
    return jnp.concatenate([gather_and_sum(half) for half in halves], -1)


def exchange_and_sum(grad: jax.Array) -> Any:
    """A reduce-scatter by hand, which moves as little."""
    parts = jax.lax.all_to_all(grad.reshape(8, -1, *grad.shape[1:]), "data", 0, 0)
    return parts.sum(0)


def all_gather(part: jax.Array) -> Any:
    return jax.lax.all_gather(part, "data", tiled=True)


def ring_gather(part: jax.Array) -> Any:
    """An all-gather as a ring of permutes, as it is written to overlap with other work."""
    parts = [part]
    for _ in range(7):
        parts.append(jax.lax.ppermute(parts[-1], "data", RING))
    stacked = jnp.concatenate(parts[::-1])
    return jnp.roll(stacked, (jax.lax.axis_index("data") + 1) * part.shape[0], 0)


def placed_gather(part: jax.Array) -> Any:
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
EXPERTS = {"up": P("data"), "down": P("data")}


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


def as_any(function: Any) -> Any:
    """Optax's types ask for names of arguments, too."""
    return function


def by_layer(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Updates stacked layers one after the other, as is done to save memory."""

    def update(grads: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        def one(_: None, layer: Tree) -> tuple[None, tuple[Tree, Tree]]:
            grad, trace, param = layer
            old: Any = (optax.TraceState(trace), optax.EmptyState())
            new: Any
            updates, new = tx.update(grad, old, param)
            return None, (updates, new[0].trace)

        _, (updates, trace) = jax.lax.scan(one, None, (grads, state[0].trace, params))
        return updates, (optax.TraceState(trace), optax.EmptyState())

    return optax.GradientTransformation(tx.init, as_any(update))


def clipped(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def multi_steps(every: int) -> optax.GradientTransformation:
    return optax.MultiSteps(ADAM, every).gradient_transformation()


GROUPS = optax.partition({"matrix": ADAM, "rest": MOMENTUM}, {"w": "matrix", "b": "rest"})
BF16 = {name: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16) for name, leaf in PARAMS.items()}


def whole_update(mesh_name: str = "data") -> Callable[[Meshes], Step]:
    """Adam whose update is computed in full on every device, from moments gathered for it."""

    def build(meshes: Meshes) -> Step:
        mesh = getattr(meshes, mesh_name)

        def update(grads: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
            mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state[0], grads)
            nu = jax.tree.map(lambda n, g: 0.99 * n + 0.01 * g * g, state[1], grads)

            def full(m: jax.Array, n: jax.Array) -> Any:
                return -0.1 * whole(m, mesh) / (jnp.sqrt(whole(n, mesh)) + 1e-8)

            return jax.tree.map(full, mu, nu), (mu, nu)

        def init(params: Tree) -> Tree:
            return tuple(jax.tree.map(jnp.zeros_like, params) for _ in range(2))

        return Recipe(mesh_name, tx=optax.GradientTransformation(init, as_any(update)))(meshes)

    return build


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


def layer_by_layer(*spec: Any) -> Callable[[jax.Array, Mesh], Any]:
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
