"""Trajectories and checkpoints of the real T5X, and what it takes to replay them.

`goldens/README.md` says where they come from.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax.core
import flax.serialization
import flax.traverse_util
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import opt_adafactor
import opt_core
import opt_optax_bridge
import opt_optax_bridge.t5x
import optax
from jax.sharding import PartitionSpec

FOLDER = Path(__file__).parent / "goldens"

StateDict = dict[str, Any]
Flat = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One optimizer with its inputs (`spec` builds it), and T5X's state dict after each step."""

    id: str
    spec: Any
    params: Any
    grads: tuple[Any, ...]
    trajectory: Mapping[str, np.ndarray]
    index: Mapping[str, Any]

    @property
    def is_bfloat16(self) -> bool:
        return any(a.dtype == ml_dtypes.bfloat16 for a in self.trajectory.values())

    @property
    def checkpoint(self) -> StateDict:
        """What T5X wrote after the last step: the state dict, out of its msgpack bytes."""
        data = (FOLDER / self.index["checkpoint"]["file"]).read_bytes()
        contents: StateDict = flax.serialization.msgpack_restore(data)
        assert contents["version"] == 3
        state_dict: StateDict = contents["optimizer"]
        return state_dict

    @property
    def param_axes(self) -> Any:
        """Logical axes of the parameters, in the parameters' own containers."""
        axes = self.index["param_logical_axes"]
        return jax.tree_util.tree_map_with_path(
            lambda path, _: PartitionSpec(*axes[_joined(path)]), self.params
        )


WRAPPED = "index.json"  # wrapped Optax optimizers
GROUPS = "groups.json"  # T5X's Adafactor, mostly in groups
LEGACY = "legacy.json"  # `flax.optim` and Flax's `TrainState`


@functools.cache
def index(file: str = WRAPPED) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / file).read_text())
    return loaded


def case_ids(file: str = WRAPPED) -> list[str]:
    return [f"{c['family']}/{c['id']}" for c in index(file)["cases"]]


def ids_with(field: str, file: str = WRAPPED) -> list[str]:
    return [f"{c['family']}/{c['id']}" for c in index(file)["cases"] if c.get(field) is not None]


@functools.cache
def load(case_id: str, file: str = WRAPPED) -> Case:
    entry = next(c for c in index(file)["cases"] if f"{c['family']}/{c['id']}" == case_id)
    problem = index(file)["problems"][entry["problem"]]
    inputs = _arrays(problem["file"])
    trajectory = {k.removeprefix("sd/"): v for k, v in _arrays(entry["file"]).items()}

    def gradients(t: int) -> Any:
        return _tree(problem["structure"], lambda path: inputs[f"grads/{path}"][t])

    return Case(
        id=case_id,
        spec=entry["constructor"],
        params=_tree(problem["structure"], lambda path: inputs[f"params/{path}"]),
        grads=tuple(gradients(t) for t in range(entry["steps"])),
        trajectory=trajectory,
        index=entry,
    )


def _arrays(file: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / file, allow_pickle=False) as data:
        names = {name: name.removesuffix("@bf16") for name in data.files}
        return {
            short: data[name].view(ml_dtypes.bfloat16) if short != name else data[name]
            for name, short in names.items()
        }


def _tree(structure: Mapping[str, Any], leaf: Callable[[str], np.ndarray]) -> Any:
    if structure["kind"] == "leaf":
        return jnp.asarray(leaf(structure["path"]))
    if structure["kind"] in ("list", "tuple"):
        items = [_tree(child, leaf) for child in structure["items"]]
        return tuple(items) if structure["kind"] == "tuple" else items
    nested = {key: _tree(child, leaf) for key, child in structure["items"].items()}
    return flax.core.freeze(nested) if structure["kind"] == "frozen" else nested


def _joined(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


# The JSON language of the constructors.

# `noisy_sgd` without a key, as it was called then; `dpsgd`, of its own doing.
_OPTAX_WARNINGS = ("Specifying a key will be required", '"seed" is deprecated')


def api_of(module: Any) -> SimpleNamespace:
    """The constructors of cases: those of a module, and T5X's others in our packages."""
    others = {"Adafactor": opt_adafactor.Adafactor, "MultiOptimizer": opt_core.MultiOptimizer}
    return SimpleNamespace(**others | {name: getattr(module, name) for name in dir(module)})


OURS, FACADE = api_of(opt_optax_bridge), api_of(opt_optax_bridge.t5x)


def build(spec: Any, api: Any) -> Any:
    """Builds what the `constructor` of a case describes, with the API of `OURS` or `FACADE`."""
    match spec:
        case {"$call": name}:
            with warnings.catch_warnings():
                for message in _OPTAX_WARNINGS:
                    warnings.filterwarnings("ignore", message)
                return _call(getattr(api, name), spec, api)
        case {"$optax": name}:
            return _call(getattr(optax, name), spec, api)
        case {"$inject": name}:
            return _call(optax.inject_hyperparams(getattr(optax, name)), spec, api)
        case {"$multisteps": inner, "k": k}:
            return optax.MultiSteps(build(inner, api), k).gradient_transformation()
        case {"$intkeys": items}:
            return {int(key): value for key, value in items.items()}
        case {"$dict": items}:
            return {key: build(value, api) for key, value in items.items()}
        case {"$frozen": items}:
            return flax.core.freeze(items)
        case {"$pair": [first, second]}:
            return build(first, api), build(second, api)
        case {"$traversal": {"path_contains": part}}:
            return _traversal(lambda path: part in path)
        case {"$traversal": {"path_not_contains": part}}:
            return _traversal(lambda path: part not in path)
        case {"$standard_logical_factor_rules": True}:
            return opt_adafactor.standard_logical_factor_rules()
        case list():
            return [build(item, api) for item in spec]
        case dict():
            raise ValueError(f"no such construct: {spec}")
    return spec


def _traversal(keep: Callable[[str], bool]) -> Any:
    """Flax's, by path; making one warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return flax.traverse_util.ModelParamTraversal(lambda path, _: keep(path))


def _call(function: Callable[..., Any], spec: Mapping[str, Any], api: Any) -> Any:
    args = build(spec.get("args", []), api)
    kwargs = {key: build(value, api) for key, value in spec.get("kwargs", {}).items()}
    return function(*args, **kwargs)


def overrides(case: Case, definition: Any, t: int) -> dict[str, Any]:
    """What was given with the gradients of a step."""
    given = dict((case.index.get("overrides") or [{}] * len(case.grads))[t])
    own, new = definition.hyper_params, given.get("hyper_params")
    if isinstance(new, list):
        given["hyper_params"] = [h.replace(**n) for h, n in zip(own, new, strict=True)]
    elif new is not None:
        given["hyper_params"] = own.replace(**new)
    return given


# State dicts, and comparing them.


def flatten(state_dict: Mapping[str, Any]) -> Flat:
    """The leaves of nested dicts by `/`-joined path; `None` is a leaf, empty dicts vanish."""
    return dict(_flatten(state_dict, ""))


def _flatten(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, child in node.items():
        if isinstance(child, Mapping):
            yield from _flatten(child, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", child


def unflatten(flat: Mapping[str, Any]) -> StateDict:
    nested: StateDict = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = nested
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return nested


def entry(case: Case, t: int) -> Flat:
    """The optimizer's state dict that T5X had after `t` steps."""
    recorded: Flat = {path: series[t] for path, series in case.trajectory.items()}
    return without_mutables(recorded) | dict.fromkeys(case.index.get("none_keys", []))


def without_mutables(flat: Flat) -> Flat:
    """Without what T5X's train state adds to the optimizer's state dict."""
    return {k: v for k, v in flat.items() if not k.startswith("flax_mutables/")}


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far floats may be off: `rtol` times the entry plus `atol` times the largest entry."""

    rtol: float
    atol: float


EXACT = Tolerance(0.0, 0.0)
# Those of the goldens' README.
OP_BY_OP = Tolerance(0.0, 4e-6)
BFLOAT16 = Tolerance(1e-2, 0.0)


def deviations(found: Flat, expected: Flat, tolerance: Tolerance) -> list[str]:
    """Every path where two state dicts differ: in keys, shapes, dtypes, or in values too far.

    T5X's step was a Python int at first; ours is int32 from the start.
    """
    lines = [f"{path}: missing" for path in expected.keys() - found.keys()]
    lines += [f"{path}: extra" for path in found.keys() - expected.keys()]
    for path in sorted(found.keys() & expected.keys()):
        a, b = np.asarray(found[path]), np.asarray(expected[path])
        if path == "state/step":
            b = np.asarray(b, np.int32)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            lines.append(f"{path}: {a.dtype}{a.shape} instead of {b.dtype}{b.shape}")
        elif (worst := _worst(a, b, tolerance)) > 1.0:
            lines.append(f"{path}: {worst:.3g} times the tolerance")
    return sorted(lines)


def _worst(found: np.ndarray, expected: np.ndarray, tolerance: Tolerance) -> float:
    """The largest difference, in units of what is tolerated."""
    if not jnp.issubdtype(expected.dtype, jnp.floating):
        return 0.0 if np.array_equal(found, expected) else np.inf
    a, b = found.astype(np.float64), expected.astype(np.float64)
    differs = ~((a == b) | (np.isnan(a) & np.isnan(b)))
    if not differs.any():
        return 0.0
    largest = np.max(np.abs(b), initial=0.0, where=np.isfinite(b))
    tolerated = tolerance.rtol * np.abs(b) + tolerance.atol * largest
    if not (np.isfinite(a - b) & (tolerated > 0))[differs].all():
        return np.inf
    return float(np.max(np.abs(a - b)[differs] / tolerated[differs]))
