"""Trajectories of the real library, and what it takes to replay them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import opt_legacy_stax as ours

FOLDER = Path(__file__).parent / "goldens"


@functools.cache
def index() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / "index.json").read_text())
    return loaded


def cases(kind: str) -> list[Any]:
    return [case for case in index()["cases"] if case["kind"] == kind]


def case_of(name: str) -> Any:
    return next(case for case in index()["cases"] if case["id"] == name)


def arrays(file: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / file, allow_pickle=False) as data:
        names = {name: name.removesuffix("@bf16") for name in data.files}
        return {
            short: data[name].view(ml_dtypes.bfloat16) if short != name else data[name]
            for name, short in names.items()
        }


def tree(structure: Mapping[str, Any], leaf: Callable[[str], Any]) -> Any:
    match structure["kind"]:
        case "leaf":
            return leaf(structure["path"])
        case "dict":
            return {k: tree(child, leaf) for k, child in structure["items"].items()}
        case "list":
            return [tree(child, leaf) for child in structure["items"]]
        case "tuple":
            return tuple(tree(child, leaf) for child in structure["items"])
    raise ValueError(structure["kind"])


def params_of(problem: Any) -> Any:
    inputs = arrays(problem["file"])
    return tree(problem["structure"], lambda path: jnp.asarray(inputs[f"params/{path}"]))


def grads_of(problem: Any, t: int) -> Any:
    inputs = arrays(problem["file"])
    return tree(problem["structure"], lambda path: jnp.asarray(inputs[f"grads/{path}"][t]))


def keywords(kwargs: Mapping[str, Any], module: Any = ours, **options: Any) -> dict[str, Any]:
    """The arguments of a case, schedules built; `options` go to those schedules that take them."""
    built = {}
    for name, value in kwargs.items():
        if isinstance(value, dict):
            schedule = getattr(module, value["$schedule"])
            extra = options if value["$schedule"] == "polynomial_decay" else {}
            value = schedule(**value["args"], **extra)
        built[name] = value
    return built


def step_of(kind: str, i: int) -> Any:
    kinds: dict[str, Any] = {"python_int": int, "jnp_int32": jnp.int32, "float": float}
    return kinds[kind](i)


def replay(case: Any, module: Any = ours, **options: Any) -> list[Any]:
    """The states that this package, or JAX's module of today, passes through."""
    problem = index()["problems"][case["problem"]]
    kwargs = keywords(case["kwargs"], module, **options)
    triple = getattr(module, case["optimizer"])(**kwargs, **options)
    update = jax.jit(triple.update_fn) if case["mode"] == "jit" else triple.update_fn
    max_norm = {"sgd_clip": 2.0, "adam_clip_bf16": 1.5}.get(case["id"])
    states = [triple.init_fn(params_of(problem))]
    for t, i in enumerate(case["step_indices"]):
        grads = grads_of(problem, t)
        if max_norm is not None:
            grads = module.clip_grads(grads, max_norm, **options)
        states.append(update(step_of(case["step_index_kind"], i), grads, states[-1]))
    return states


def expected_leaves(case: Any, t: int) -> list[list[np.ndarray]]:
    """The packed state that the library had after `t` updates."""
    series = arrays(case["file"])
    packed = []
    for path in index()["problems"][case["problem"]]["leaf_paths"]:
        names = (f"state/{path}/{j}" for j in range(20))
        packed.append([series[name][t] for name in names if name in series])
    return packed


def worst(found: Any, expected: Any) -> float:
    """The largest difference of two arrays, in units of the largest entry of the second."""
    a, b = (np.asarray(x, np.float64) for x in (found, expected))
    assert a.shape == b.shape
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    largest = np.max(np.abs(b), where=np.isfinite(b), initial=0.0)
    return float(np.max(np.where(same, 0.0, np.abs(a - b))) / largest)
