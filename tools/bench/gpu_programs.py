"""What XLA compiles for a GPU, counted without one: bytes, kernels, temporaries, collectives.

    hatch run gpu-programs:bench --only gpu_programs --quick

Steps are compiled for one H100, or for eight, that are only described, and never run. Bytes are the
operands and results of all kernels, each array once; kernels are those that write more than a
number. Low precision is a donated step with bfloat16 parameters and gradients, stochastic rounding
and a `chunk_bytes` of 1/64 of the float32 parameters; moments are `dynamic8` where nothing else is
said. Temporaries are bytes a parameter. Without the compiler, `jax-cuda12-pjrt`, one row says so.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any

import _gpu_target
import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import opt_precision as op
import optax
from _common import Figure, Row, counted, counts, main, optax_step
from _kernels import conversions, kernels, whole_copies
from _steps import OPTIMIZERS, plan_step
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from opt_partition import Expected, memory_plan, read_collectives, verify

contrib: Any = optax.contrib

LEAST = {"float32": 28, "bfloat16": 22}  # bytes a parameter: see `peers.py`
CHUNKS = 64  # chunks of the float32 parameters
LOW: dict[str, tuple[Any, Any]] = {
    "dynamic8": (optax.adamw(1e-3), op.dynamic8()),
    "log8": (optax.adamw(1e-3), op.log8()),
    "float8": (optax.adamw(1e-3), op.float8()),
    "bfloat16": (optax.adamw(1e-3), op.bfloat16()),
    "LAMB": (optax.lamb(1e-3), op.dynamic8()),
    "clipped AdamW": (
        optax.chain(optax.adamw(1e-3), optax.clip_by_global_norm(1.0)),
        op.dynamic8(),
    ),
    "NovoGrad": (optax.novograd(1e-3), op.dynamic8()),
    "Muon": (contrib.muon(1e-3), op.dynamic8()),  # needs whole matrices
}
HOSTED = {"float32": op.identity(), "dynamic8": op.dynamic8()}
ON_SHARDS = {"AdamW": optax.adamw(1e-3), "LAMB": optax.lamb(1e-3)}
ZERO, MUON = OPTIMIZERS[0], OPTIMIZERS[2]

FIGURES = {"compilers missing": Figure("none", None, "")}
if _gpu_target.version():
    FIGURES |= {
        f"{what}, AdamW, {dtype}, {by}": figure
        for dtype in LEAST
        for by in ("Optax", "opt-optax-bridge")
        for what, figure in {
            "bytes": Figure("the least", 1.001, "B"),
            "kernels": Figure("one a leaf", 1.0, "kernels"),
        }.items()
    }
    FIGURES |= {
        f"{what}, {name}": figure
        for name in LOW
        for what, figure in {
            "temporaries": Figure("a byte a parameter", 1.5 + 2 * 4 / CHUNKS, "B"),
            "copies of a leaf": Figure("none", 1.0, "copies"),
            "conversions to bfloat16": Figure("none", 1.0, "conversions"),
            "bytes not aliased": Figure("none", 1.0, "B"),
        }.items()
    }
    FIGURES["temporaries, Muon"] = Figure("raw Optax", None, "B")
    FIGURES |= {
        f"{what}, {name} on the host": figure
        for name in HOSTED
        for what, figure in {
            "host temporaries": Figure("none", 1.0, "B"),
            "copies of a leaf": Figure("none", 1.0, "copies"),
        }.items()
    }
    FIGURES |= {
        f"collectives, {ZERO}": Figure("2 a leaf", 1.0, "collectives"),
        f"errors of verify, {ZERO}": Figure("none", 1.0, "errors"),
        f"collectives, {MUON}": Figure("the plan", 1.0, "collectives"),
        **{
            f"collectives, {name} in 8 bits": Figure("raw Optax", 1.0, "collectives")
            for name in ON_SHARDS
        },
    }


def shapes_of(leaves: int, side: int, dtype: Any) -> dict[str, Any]:
    """Returns the shapes of square matrices."""
    return {f"w{i}": jax.ShapeDtypeStruct((side, side), dtype) for i in range(leaves)}


def placed(tree: Any, sharding: NamedSharding) -> Any:
    """Returns shapes with a sharding."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )


def one_gpu() -> NamedSharding:
    """Returns the place of an array on the one GPU."""
    return NamedSharding(Mesh(np.array(_gpu_target.devices(1)), ("data",)), PartitionSpec())


def compile_on(gpu: NamedSharding, step: Callable[..., Any], *donated: Any, grads: Any) -> Any:
    """Compiles a step that is given its first operands back."""
    jitted = jax.jit(step, donate_argnums=tuple(range(len(donated))))
    return jitted.lower(*(placed(tree, gpu) for tree in (*donated, grads))).compile()


def measure_adamw(leaves: int, side: int) -> Iterator[Row]:
    """Yields the bytes and kernels of AdamW with moments in float32."""
    gpu, wide = one_gpu(), shapes_of(leaves, side, jnp.float32)
    definition = opt.adamw(1e-3, weight_decay=0.1)
    tx = definition.optax_optimizer
    for dtype, least in LEAST.items():
        params = shapes_of(leaves, side, dtype)
        state = jax.eval_shape(tx.init, wide)
        optimizer = jax.eval_shape(definition.create, wide).replace(target=params)
        steps = {
            "Optax": compile_on(gpu, optax_step(tx), params, state, grads=params),
            "opt-optax-bridge": compile_on(
                gpu, lambda o, grads: o.apply_gradient(grads), optimizer, grads=params
            ),
        }
        for by, compiled in steps.items():
            found = kernels(compiled.as_text())
            moved = sum(kernel.bytes for kernel in found) / (leaves * side**2)
            large = sum(kernel.elements > 1 for kernel in found)
            note = f"and {len(found) - large} that write numbers"
            name = f"AdamW, {dtype}, {by}"
            yield counted(f"bytes, {name}", moved, least, size=leaves)
            yield counted(f"kernels, {name}", large, leaves, size=leaves, note=note)


def in_low_precision(tx: Any, codec: Any, chunk_bytes: int, layout: Any = None) -> Any:
    """Returns a transformation with encoded moments and bfloat16 parameters."""
    inner = op.quantize_state(tx, codec, chunk_bytes=chunk_bytes, layout=layout)
    return op.stochastic_weights(inner)


def measure_low_precision(leaves: int, side: int) -> Iterator[Row]:
    """Yields temporaries, copies, conversions and aliases of donated steps."""
    gpu, params = one_gpu(), shapes_of(leaves, side, jnp.bfloat16)
    number = leaves * side**2
    for name, (inner, codec) in LOW.items():
        tx = in_low_precision(inner, codec, 4 * number // CHUNKS)
        state = jax.eval_shape(tx.init, params)
        compiled = compile_on(gpu, tx.apply, params, state, grads=params)
        memory, text = compiled.memory_analysis(), compiled.as_text()
        theirs = 1.0
        if name == "Muon":
            wide = shapes_of(leaves, side, jnp.float32)
            raw = compile_on(
                gpu, optax_step(inner), wide, jax.eval_shape(inner.init, wide), grads=wide
            )
            theirs = raw.memory_analysis().temp_size_in_bytes / number
        arrays = [leaf for leaf in jax.tree.leaves((params, state)) if leaf.size > 1]
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in arrays)
        found = {
            "copies of a leaf": len(whole_copies(text, side**2)),
            "conversions to bfloat16": len(conversions(text, "f32", "bf16")),
            "bytes not aliased": max(0, held - memory.alias_size_in_bytes),
        }
        temporaries = memory.temp_size_in_bytes / number
        yield counted(f"temporaries, {name}", temporaries, theirs, size=leaves)
        for what, count in found.items():
            yield counted(f"{what}, {name}", count, 0, size=leaves)


def hosted_state(tx: Any, params: Any, gpu: NamedSharding) -> Any:
    """Returns the shapes of a state, those that `init` puts on the host with that memory."""
    lies = jax.jit(tx.init).lower(placed(params, gpu)).compile().output_shardings
    # Described devices have no memories, so that only the sharding of an abstract mesh names one.
    host = NamedSharding(gpu.mesh.abstract_mesh, PartitionSpec(), memory_kind="pinned_host")
    return jax.tree.map(
        lambda leaf, found: placed(leaf, host if found.memory_kind == host.memory_kind else gpu),
        jax.eval_shape(tx.init, params),
        lies,
    )


def measure_host(leaves: int, side: int) -> Iterator[Row]:
    """Yields what a step with its moments on the host holds and copies there."""
    gpu, params = one_gpu(), shapes_of(leaves, side, jnp.bfloat16)
    for name, codec in HOSTED.items():
        inner = op.offload_state(optax.adamw(1e-3))
        tx = in_low_precision(inner, codec, 4 * leaves * side**2 // CHUNKS)
        state, given = hosted_state(tx, params, gpu), placed(params, gpu)
        compiled: Any = (
            jax.jit(tx.apply, donate_argnums=(0, 1)).lower(given, state, given).compile()
        )
        memory = compiled.memory_analysis()
        note = f"{memory.host_argument_size_in_bytes:,} bytes of arguments are there"
        figure = f"host temporaries, {name} on the host"
        yield counted(figure, memory.host_temp_size_in_bytes, 0, size=leaves, note=note)
        copies = whole_copies(compiled.as_text(), side**2)
        yield counted(f"copies of a leaf, {name} on the host", len(copies), 0, size=leaves)


def training_step(tx: Any) -> Callable[..., Any]:
    """Returns a step of a model with independent layers, its gradients made inside."""

    def loss(params: Any, batch: Any) -> Any:
        return sum(jnp.mean(jnp.tanh(batch @ layer) ** 2) for layer in params.values())

    def step(params: Any, state: Any, batch: Any) -> Any:
        return optax_step(tx)(params, state, jax.grad(loss)(params, batch))

    return step


def compile_planned(
    step: Callable[..., Any], plan: Any, params: Any, state: Any, data: Any, sharding: Any
) -> Any:
    """Compiles a step for the devices of a plan, parameters and state donated."""
    places = (plan.params.shardings, plan.state.shardings)
    jitted = jax.jit(
        step, in_shardings=(*places, sharding), out_shardings=places, donate_argnums=(0, 1)
    )
    return jitted.lower(params, state, data).compile()


def measure_zero(leaves: int, side: int) -> Iterator[Row]:
    """Yields what ZeRO-1 moves, and what `verify` says of it."""
    planned = plan_step(ZERO, 8, 1, leaves, (side, 4 * side), among=_gpu_target.devices(8))
    plan = planned.plan
    batch = jax.ShapeDtypeStruct((64, side), jnp.float32)
    rows = NamedSharding(plan.mesh, PartitionSpec("data"))
    step = training_step(planned.tx)
    compiled = compile_planned(step, plan, planned.params, planned.state, batch, rows)
    layouts = (plan.params, plan.state)
    report = verify(compiled, Expected(inputs=layouts, outputs=layouts), raises=False)
    moved = [row for row in report.collectives if math.prod(row.shape) > 1]
    note = f"arrays, in {sum(counts(compiled).collectives.values())} instructions"
    yield counted(f"collectives, {ZERO}", len(moved), 2 * leaves, size=leaves, note=note)
    yield counted(f"errors of verify, {ZERO}", len(report.errors), 0, size=leaves)


def measure_muon(leaves: int, side: int) -> Iterator[Row]:
    """Yields the collectives of Muon on shards of matrices."""
    planned = plan_step(MUON, 8, 1, leaves, (side, 4 * side), among=_gpu_target.devices(8))
    plan = planned.plan
    compiled = compile_planned(
        optax_step(planned.tx),
        plan,
        planned.params,
        planned.state,
        planned.params,
        plan.grads.shardings,
    )
    found = sum(row.count for row in read_collectives(compiled))
    yield counted(f"collectives, {MUON}", found, planned.collectives or 0, size=leaves)


def measure_shards(leaves: int, side: int) -> Iterator[Row]:
    """Yields the collectives of low precision where devices hold whole blocks."""
    mesh = Mesh(np.array(_gpu_target.devices(8)), ("data",), axis_types=(AxisType.Auto,))
    params = shapes_of(leaves, side, jnp.bfloat16)
    layout = dict.fromkeys(params, NamedSharding(mesh, PartitionSpec("data")))
    for name, inner in ON_SHARDS.items():
        ours = in_low_precision(inner, op.dynamic8(), 4 * leaves * side**2 // CHUNKS, layout)
        found = {}
        for tx, step in ((ours, ours.apply), (inner, optax_step(inner))):
            plan = memory_plan(
                tx,
                params,
                dict.fromkeys(params, ("embed", "mlp")),
                [("embed", "data"), ("mlp", None)],
                mesh,
                derivation_rules=op.partition_rules(),
            )
            compiled = compile_planned(
                step, plan, params, jax.eval_shape(tx.init, params), params, layout
            )
            found[tx is ours] = sum(counts(compiled).collectives.values())
        yield counted(f"collectives, {name} in 8 bits", found[True], found[False], size=leaves)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--leaves", type=int, help="8, or 4 with --quick")
    parser.add_argument("--side", type=int, help="of square matrices: 1024, or 512 with --quick")


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows."""
    installed = _gpu_target.version()
    note = (
        f"{_gpu_target.WHEEL} {installed}, for {_gpu_target.NAME}"
        if installed
        else f"nothing was measured, {_gpu_target.WHEEL} is not installed: "
        "`hatch run gpu-programs:bench --only gpu_programs`"
    )
    yield counted("compilers missing", not installed, 0, note=note)
    if not installed:
        return
    leaves = options.leaves or (4 if options.quick else 8)
    side = options.side or (512 if options.quick else 1024)
    for of in (
        measure_adamw,
        measure_low_precision,
        measure_host,
        measure_zero,
        measure_muon,
        measure_shards,
    ):
        yield from of(leaves, side)


if __name__ == "__main__":
    main(__doc__, FIGURES, measure, arguments, environment=_gpu_target.ENVIRONMENT)
