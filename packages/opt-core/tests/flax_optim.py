"""Definitions with a state per parameter, as `flax.optim` had them, and its recorded runs."""

import functools
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax.core
import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import ModelParamTraversal
from opt_core import MultiOptimizer, OptimizerDef, OptimizerState, increment_step

FOLDER = Path(__file__).parent / "goldens"


@flax.struct.dataclass
class HyperParams:
    learning_rate: Any
    weight_decay: Any = 0.0


@flax.struct.dataclass
class MomentumState:
    momentum: Any


@flax.struct.dataclass
class MomentsState:
    grad_ema: Any
    grad_sq_ema: Any


class PerParameter(OptimizerDef):
    """One state per parameter, updates of one parameter at a time."""

    def __init__(self, learning_rate: Any, weight_decay: Any = 0.0) -> None:
        super().__init__(HyperParams(learning_rate, weight_decay))

    def init_one(self, param: Any) -> Any:
        raise NotImplementedError

    def update_one(self, hyper: Any, step: Any, param: Any, state: Any, grad: Any) -> Any:
        raise NotImplementedError

    def init_state(self, params: Any) -> OptimizerState:
        return OptimizerState(jnp.zeros((), jnp.int32), jax.tree.map(self.init_one, params))

    def apply_gradient(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any
    ) -> tuple[Any, OptimizerState]:
        leaves = jax.tree.leaves(params)
        treedef: Any = jax.tree.structure(params)
        states, gradients = map(treedef.flatten_up_to, (state.param_states, grads))
        step = increment_step(state.step)
        updated = [
            self.update_one(hyper_params, step.astype(jnp.float32), *leaf)
            for leaf in zip(leaves, states, gradients, strict=True)
        ]
        new, new_states = [treedef.unflatten([u[i] for u in updated]) for i in (0, 1)]
        return new, OptimizerState(step, new_states)


class GradientDescent(PerParameter):
    def init_one(self, param: Any) -> Any:
        return {}

    def update_one(self, hyper: Any, step: Any, param: Any, state: Any, grad: Any) -> Any:
        return param - hyper.learning_rate * grad, state


class Momentum(PerParameter):
    def init_one(self, param: Any) -> Any:
        return MomentumState(jnp.zeros_like(param))

    def update_one(self, hyper: Any, step: Any, param: Any, state: Any, grad: Any) -> Any:
        momentum = 0.9 * state.momentum + grad
        return param - hyper.learning_rate * momentum, MomentumState(momentum)


class Adam(PerParameter):
    eps = 1e-8

    def init_one(self, param: Any) -> Any:
        return MomentsState(jnp.zeros_like(param), jnp.zeros_like(param))

    def moments(self, step: Any, state: Any, grad: Any) -> tuple[Any, Any]:
        ema = 0.1 * grad + 0.9 * state.grad_ema
        sq_ema = (1.0 - 0.999) * jax.lax.square(grad) + 0.999 * state.grad_sq_ema
        first, second = ema / (1 - 0.9**step), sq_ema / (1 - 0.999**step)
        return first / (jnp.sqrt(second) + self.eps), MomentsState(ema, sq_ema)

    def update_one(self, hyper: Any, step: Any, param: Any, state: Any, grad: Any) -> Any:
        update, state = self.moments(step, state, grad)
        return param - hyper.learning_rate * update, state


class Lamb(Adam):
    eps = 1e-6

    def update_one(self, hyper: Any, step: Any, param: Any, state: Any, grad: Any) -> Any:
        update, state = self.moments(step, state, grad)
        update = update + hyper.weight_decay * param
        norms = jnp.linalg.norm(param), jnp.linalg.norm(update)
        trust = jnp.where(norms[0] + norms[1] > 0.0, norms[0] / norms[1], 1.0)
        return param - hyper.learning_rate * trust * update, state


def traversal(keep: Callable[[str], bool]) -> ModelParamTraversal:
    """Flax's, by path; making one warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return ModelParamTraversal(lambda path, _: keep(path))


# The recorded runs.

DEFINITIONS = {
    "Momentum": Momentum,
    "Adam": Adam,
    "LAMB": Lamb,
    "GradientDescent": GradientDescent,
}


@functools.cache
def index() -> Any:
    return json.loads((FOLDER / "index.json").read_text())


def case_ids() -> list[str]:
    return [case["id"] for case in index()["cases"]]


def case(case_id: str) -> Any:
    return next(c for c in index()["cases"] if c["id"] == case_id)


def build(spec: Any) -> Any:
    match spec:
        case {"path_contains": part}:
            return traversal(lambda path: part in path)
        case {"path_not_contains": part}:
            return traversal(lambda path: part not in path)
        case {"$traversal": inner}:
            return build(inner)
        case {"$pair": [a, b]}:
            return build(a), build(b)
        case {"$call": "MultiOptimizer", "args": pairs}:
            return MultiOptimizer(*map(build, pairs))
        case {"$call": name, "kwargs": kwargs}:
            return DEFINITIONS[name](**kwargs)
    raise ValueError(f"no such construct: {spec}")


def definition_of(case_id: str) -> MultiOptimizer:
    entry = case(case_id)
    if isinstance(entry["constructor"], str):  # described in words
        kernels, biases = (build({"path_contains": part}) for part in ("kernel", "bias"))
        return MultiOptimizer((kernels, Momentum(0.05)), (biases, Adam(0.1)))
    if "focus" in entry:
        return MultiOptimizer((build(entry["focus"]), build(entry["constructor"])))
    definition: MultiOptimizer = build(entry["constructor"])
    return definition


def inputs(case_id: str) -> tuple[Any, list[Any]]:
    entry = case(case_id)
    problem = index()["problems"][entry["problem"]]
    arrays = arrays_in(problem["file"])

    def tree(node: Any, leaf: Callable[[str], Any]) -> Any:
        if node["kind"] == "leaf":
            return jnp.asarray(leaf(node["path"]))
        nested = {key: tree(child, leaf) for key, child in node["items"].items()}
        return flax.core.freeze(nested) if node["kind"] == "frozen" else nested

    structure = problem["structure"]

    def gradients(t: int) -> Any:
        return tree(structure, lambda path: arrays[f"grads/{path}"][t])

    return tree(structure, lambda path: arrays[f"params/{path}"]), [
        gradients(t) for t in range(entry["steps"])
    ]


def arrays_in(file: str) -> Mapping[str, np.ndarray]:
    with np.load(FOLDER / file, allow_pickle=False) as data:
        return {name: data[name] for name in data.files}


def trajectory(case_id: str) -> dict[str, np.ndarray]:
    return {k.removeprefix("sd/"): v for k, v in arrays_in(case(case_id)["file"]).items()}


def checkpoint(case_id: str) -> Any:
    data = (FOLDER / case(case_id)["checkpoint"]["file"]).read_bytes()
    return flax.serialization.msgpack_restore(data)


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested dicts by `/`-joined path; an empty dict is a leaf."""
    if not isinstance(node, Mapping) or not node:
        return {prefix: node}
    found: dict[str, Any] = {}
    for key, child in node.items():
        found |= flatten(child, f"{prefix}/{key}" if prefix else key)
    return found
