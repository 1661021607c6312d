"""What XLA compiles for a GPU, counted without one: bytes, kernels, temporaries, collectives.

    hatch run gpu-programs:bench --only gpu_programs --quick

Steps are compiled for one H100, or for eight, that are only described, and never run. Bytes are the
operands and results of all kernels, each array once; kernels are those that write more than a
number. Low precision is a donated step with bfloat16 parameters and gradients, stochastic rounding
and a `chunk_bytes` of 1/64 of the float32 parameters; moments are `dynamic8` where nothing else is
said. Temporaries are bytes a parameter. Without the compiler, `jax-cuda12-pjrt`, one row says so.
"""

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
from _common import Counts, Row, counted, optax_step
from _kernels import conversions, kernels, whole_copies
from _steps import MUON, ZERO, Planned, plan_step
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from opt_partition import memory_plan, read_collectives, verify

contrib: Any = optax.contrib

LEAST = {"float32": 28, "bfloat16": 22}  # bytes a parameter: see `peers.py`
CHUNKS = 64  # chunks of the float32 parameters
MOST = 1.5 + 2 * 4 / CHUNKS  # bytes of temporaries a parameter
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

# Bytes a parameter that a step in low precision reads and writes; 10 or 14 would be the least.
MOVED = {"dynamic8": 30, "log8": 26, "float8": 30, "bfloat16": 27}


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
        params, state = shapes_of(leaves, side, dtype), jax.eval_shape(tx.init, wide)
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
            name, note = f"AdamW, {dtype}, {by}", f"and {len(found) - large} that write numbers"
            yield counted(f"bytes a parameter, {name}", moved, "the least", least, limit=1.001)
            yield counted(f"kernels, {name}", large, "one a leaf", leaves, limit=1.0, note=note)


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
        peer, theirs, limit, copies = "a byte a parameter", 1.0, MOST, 0
        if name == "Muon":
            wide = shapes_of(leaves, side, jnp.float32)
            state_of = jax.eval_shape(inner.init, wide)
            raw = compile_on(gpu, optax_step(inner), wide, state_of, grads=wide)
            peer, limit, copies = "raw Optax, float32", 1.0, leaves
            theirs = raw.memory_analysis().temp_size_in_bytes / number
        if name in MOVED:
            found, most = kernels(text), MOVED[name]
            moved = sum(kernel.bytes for kernel in found) / number
            note = f"{sum(kernel.times for kernel in found) / CHUNKS:.0f} kernels a block"
            figure = f"bytes a parameter, {name}"
            yield counted(figure, moved, "a byte a parameter", 1, limit=most, note=note)
        temporaries = memory.temp_size_in_bytes / number
        yield counted(f"temporaries, {name}", temporaries, peer, theirs, limit=limit)
        arrays = [leaf for leaf in jax.tree.leaves((params, state)) if leaf.size > 1]
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in arrays)
        for what, count in {
            "copies of a leaf": len(whole_copies(text, side**2)),
            "conversions to bfloat16": len(conversions(text, "f32", "bf16")),
            "bytes not aliased": max(0, held - memory.alias_size_in_bytes),
        }.items():
            least = copies if what == "copies of a leaf" else 0
            peer = "one a leaf" if least else "none"
            yield counted(f"{what}, {name}", count, peer, least, limit=1.0)


def measure_host(leaves: int, side: int) -> Iterator[Row]:
    """Yields what a step with its moments on the host holds and copies there."""
    gpu, params = one_gpu(), shapes_of(leaves, side, jnp.bfloat16)
    # Described devices have no memories, so that only the sharding of an abstract mesh names one.
    host = NamedSharding(gpu.mesh.abstract_mesh, PartitionSpec(), memory_kind="pinned_host")
    for name, codec in {"float32": op.identity(), "dynamic8": op.dynamic8()}.items():
        inner = op.offload_state(optax.adamw(1e-3))
        tx = in_low_precision(inner, codec, 4 * leaves * side**2 // CHUNKS)
        given = placed(params, gpu)
        lies = jax.jit(tx.init).lower(given).compile().output_shardings
        state = jax.tree.map(
            lambda leaf, at: placed(leaf, host if at.memory_kind == "pinned_host" else gpu),
            *(jax.eval_shape(tx.init, params), lies),
        )
        step = jax.jit(tx.apply, donate_argnums=(0, 1)).lower(given, state, given)
        compiled: Any = step.compile()
        memory = compiled.memory_analysis()
        note = f"{memory.host_argument_size_in_bytes:,} bytes of arguments are there"
        held, where = memory.host_temp_size_in_bytes, f"{name} on the host"
        yield counted(f"temporaries there, {where}", held, "none", 0, limit=1.0, note=note)
        copies = len(whole_copies(compiled.as_text(), side**2))
        yield counted(f"copies of a leaf, {where}", copies, "none", 0, limit=1.0)


def measure_planned(leaves: int, side: int) -> Iterator[Row]:
    """Yields what ZeRO-1 moves and what `verify` says of it, and the collectives of Muon."""
    among, shape = _gpu_target.devices(8), (side, 4 * side)
    planned = plan_step(ZERO, 8, 1, leaves, shape, among)
    batch = jax.ShapeDtypeStruct((64, side), jnp.float32)
    compiled: Any = planned.lower(planned.training_step, batch).compile()
    report = verify(compiled, planned.expected, raises=False)
    moved = [row for row in report.collectives if math.prod(row.shape) > 1]
    note = f"arrays, in {Counts(compiled).collectives} instructions"
    peer = "2 a leaf"
    yield counted(f"collectives, {ZERO}", len(moved), peer, 2 * leaves, limit=1.0, note=note)
    yield counted(f"errors of verify, {ZERO}", len(report.errors), "none", 0, limit=1.0)
    planned = plan_step(MUON, 8, 1, leaves, shape, among)
    found = sum(row.count for row in read_collectives(planned.lower().compile()))
    yield counted(f"collectives, {MUON}", found, "the plan", planned.collectives or 0, limit=1.0)


def measure_shards(leaves: int, side: int) -> Iterator[Row]:
    """Yields the collectives of low precision where devices hold whole blocks."""
    mesh = Mesh(np.array(_gpu_target.devices(8)), ("data",), axis_types=(AxisType.Auto,))
    params = shapes_of(leaves, side, jnp.bfloat16)
    axes, rules = dict.fromkeys(params, ("embed", "mlp")), [("embed", "data"), ("mlp", None)]
    layout = dict.fromkeys(params, NamedSharding(mesh, PartitionSpec("data")))
    for name, inner in {"AdamW": optax.adamw(1e-3), "LAMB": optax.lamb(1e-3)}.items():
        ours = in_low_precision(inner, op.dynamic8(), 4 * leaves * side**2 // CHUNKS, layout)
        found = []
        for tx, step in ((ours, ours.apply), (inner, optax_step(inner))):
            derivation = op.partition_rules()
            plan = memory_plan(tx, params, axes, rules, mesh, derivation_rules=derivation)
            planned = Planned(tx, params, jax.eval_shape(tx.init, params), plan)
            found.append(Counts(planned.lower(step).compile()).collectives)
        yield counted(f"collectives, {name} in 8 bits", found[0], "raw Optax", found[1], limit=1.0)


def measure(quick: bool) -> Iterator[Row]:
    """Yields the rows."""
    installed = _gpu_target.version()
    note = f"{_gpu_target.WHEEL} {installed}, for {_gpu_target.NAME}"
    if not installed:
        note = (
            f"nothing was measured, {_gpu_target.WHEEL} is not installed: "
            "`hatch run gpu-programs:bench --only gpu_programs`"
        )
    yield counted("compilers missing", not installed, "none", 0, note=note)
    if installed:
        sizes = (4, 512) if quick else (8, 1024)
        for of in (measure_adamw, measure_low_precision, measure_host, measure_planned):
            yield from of(*sizes)
        yield from measure_shards(*sizes)
