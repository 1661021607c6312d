"""T5X's trajectories and checkpoints of Adafactor; see `goldens/README.md`."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import flax.core
import flax.serialization
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import opt_adafactor
from jax.sharding import PartitionSpec
from opt_adafactor import HEURISTIC_RULE, Adafactor, FactorDim, HParamMap
from opt_core import Optimizer

FOLDER = Path(__file__).parent / "goldens"

Flat = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration with its inputs, and what T5X made of them."""

    index: Mapping[str, Any]
    params: Any
    grads: tuple[Any, ...]  # one tree for each step
    trajectory: Flat  # by path in the state dict, `steps + 1` entries each

    @property
    def param_axes(self) -> Any:
        axes = self.index["param_logical_axes"]
        structure = index()["problems"][self.index["problem"]]["structure"]
        return _tree(structure, lambda path: PartitionSpec(*axes[path]))

    @property
    def checkpoint(self) -> dict[str, Any]:
        data = (FOLDER / self.index["checkpoint"]).read_bytes()
        contents: dict[str, Any] = flax.serialization.msgpack_restore(data)["optimizer"]
        return contents

    def definition(self, kind: type[Adafactor] = Adafactor, **changes: Any) -> Adafactor:
        """The definition with the axes, given as T5X's trainer does."""
        definition = kind(**{**_build(self.index["constructor"]["kwargs"]), **changes})
        if self.index.get("param_logical_axes"):
            definition.set_param_axes(self.param_axes)
        return definition

    def create(self) -> Optimizer:
        optimizer = self.definition().create(self.params)
        start = self.index.get("initial_step", 0)
        return optimizer.replace(state=optimizer.state.replace(step=jnp.int32(start)))

    def overrides(self, t: int) -> dict[str, Any]:
        given: list[dict[str, Any]] = self.index.get("overrides") or [{}] * len(self.grads)
        return given[t]

    def entry(self, t: int) -> Flat:
        return {path: series[t] for path, series in self.trajectory.items()}


@functools.cache
def index() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / "index.json").read_text())
    return loaded


def case_ids(field: str | None = None) -> list[str]:
    return [c["id"] for c in index()["cases"] if field is None or c.get(field)]


@functools.cache
def load(case_id: str) -> Case:
    entry = next(c for c in index()["cases"] if c["id"] == case_id)
    problem = index()["problems"][entry["problem"]]
    inputs = _arrays(problem["file"])
    trajectory = {k.removeprefix("sd/"): v for k, v in _arrays(entry["file"]).items()}

    def gradient(t: int, path: str) -> Any:
        grad = np.array(inputs[f"grads/{path}"][t])
        if case_id == "Adafactor_skip_nan" and t in (2, 5):
            grad.ravel()[0] = np.nan
        return jnp.asarray(grad)

    grads = tuple(
        _tree(problem["structure"], functools.partial(gradient, t)) for t in range(entry["steps"])
    )
    params = _tree(problem["structure"], lambda path: jnp.asarray(inputs[f"params/{path}"]))
    return Case(entry, params, grads, trajectory)


def _arrays(file: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / file, allow_pickle=False) as data:
        names = {name: name.removesuffix("@bf16") for name in data.files}
        return {
            short: data[name].view(ml_dtypes.bfloat16) if short != name else data[name]
            for name, short in names.items()
        }


def _tree(structure: Mapping[str, Any], leaf: Callable[[str], Any]) -> Any:
    if structure["kind"] == "leaf":
        return leaf(structure["path"])
    nested = {key: _tree(child, leaf) for key, child in structure["items"].items()}
    return flax.core.freeze(nested) if structure["kind"] == "frozen" else nested


def _build(spec: Any) -> Any:
    match spec:
        case {"$dtype": name}:
            return jnp.dtype(name)
        case {"$hparam_map": rules}:
            return HParamMap([(pattern, _rule(value)) for pattern, value in rules])
        case {"$standard_logical_factor_rules": True}:
            return opt_adafactor.standard_logical_factor_rules()
        case {"$logical_rules": rules}:
            return rules
        case dict():
            return {key: _build(value) for key, value in spec.items()}
    return spec


def _rule(value: Any) -> Any:
    if value == "HEURISTIC_RULE":
        return HEURISTIC_RULE
    return tuple(FactorDim[name] for name in value) if isinstance(value, list) else value


def flatten(node: Mapping[str, Any], prefix: str = "") -> Flat:
    """The leaves of nested dicts by `/`-joined path."""
    return dict(_flatten(node, prefix))


def _flatten(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, child in node.items():
        if isinstance(child, Mapping):
            yield from _flatten(child, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", child


def deviations(found: Flat, expected: Flat, rtol: float, atol: float) -> list[str]:
    """Every path where two state dicts differ: in keys, shapes or dtypes, or in values too far.

    `atol` is relative to the largest entry of an array.
    """
    lines = [f"{path}: missing" for path in expected.keys() - found.keys()]
    lines += [f"{path}: extra" for path in found.keys() - expected.keys()]
    for path in sorted(found.keys() & expected.keys()):
        a, b = np.asarray(found[path]), np.asarray(expected[path])
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            lines.append(f"{path}: {a.dtype}{a.shape} instead of {b.dtype}{b.shape}")
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        tolerated = rtol * np.abs(b) + atol * np.max(np.abs(b), initial=0.0)
        if not (np.isfinite(a) & (np.abs(a - b) <= tolerated)).all():
            lines.append(f"{path}: off by up to {np.max(np.abs(a - b))}")
    return sorted(lines)
