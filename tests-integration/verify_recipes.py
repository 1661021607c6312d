"""How the training steps of `verify`'s tables are put together.

Each is built for eight devices of any kind, so that the same tables serve CPUs and the compilers of
TPUs that need no TPU; `verify_texts.py` stores what these make of it. Nothing is ever run.
"""

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


def layers(**more: Any) -> Recipe:
    """A recipe of stacked layers."""
    arguments = {"shapes": LAYERS, "loss": layers_loss, **more}
    return Recipe(**arguments)
