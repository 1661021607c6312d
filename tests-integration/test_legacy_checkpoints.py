"""Genuine legacy checkpoints restore into optimizers of today, or are refused with the reason."""

import contextlib
from pathlib import Path
from typing import Any

import flax.serialization
import golden_cases as g
import jax
import numpy as np
import opt_optax_bridge
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from opt_adafactor import HEURISTIC_RULE, Adafactor, FactorDim, HParamMap
from opt_checkpoint import read_legacy, restore_legacy
from opt_checkpoint.errors import LoadError
from opt_core import MultiOptimizer, Optimizer, OptimizerDef, to_state_dict
from opt_core.errors import RestoreError
from opt_optax_bridge import OptaxWrapper, wrap_optax_optimizer

FLAX = [case for case in g.index(g.LEGACY)["cases"] if case["family"] != "train_state"]
TRAIN_STATES = [case for case in g.index(g.LEGACY)["cases"] if case["family"] == "train_state"]
WRAPPED = g.ids_with("checkpoint", g.WRAPPED)
GROUPS = g.ids_with("checkpoint", g.GROUPS)

REFUSED = {
    "WeightNorm_Momentum": "WeightNorm",
    "WeightNorm_Adam_decay": "WeightNorm",
    "DynamicScale_41": "DynamicScale",
    "DynamicScale_42": "DynamicScale",
}
# Field of `flax.optim` -> fields of Optax that may hold it.
FIELDS = {
    "grad_ema": ("mu",),
    "grad_sq_ema": ("nu",),
    "momentum": ("trace",),
    "G": ("sum_of_squares",),
    "v": ("nu", "v"),
    "mg": ("mu",),
    "sq_avg": ("e_g",),
    "acc_delta": ("e_x",),
    "v_row": ("v_row",),
    "v_col": ("v_col",),
    "m": ("ema",),
}


def call(optimizer: str, **kwargs: float) -> dict[str, Any]:
    return {"$call": optimizer, "kwargs": kwargs}


def of(part: str, optimizer: dict[str, Any]) -> dict[str, Any]:
    return {"$pair": [{"$traversal": {"path_contains": part}}, optimizer]}


# The two cases of Flax 0.3.2 describe themselves in words.
IN_032 = {
    "Adam_032": call("Adam", learning_rate=0.01, weight_decay=0.1),
    "Multi_kernel_bias_032": {
        "$call": "MultiOptimizer",
        "args": [
            of("kernel", call("Momentum", learning_rate=0.05)),
            of("bias", call("Adam", learning_rate=0.1)),
        ],
    },
}


def decayed(scaling: Any, weight_decay: float, rate: Any) -> optax.GradientTransformation:
    return optax.chain(scaling, optax.add_decayed_weights(weight_decay), optax.sgd(rate))


def adafactor(
    learning_rate: Any,
    factored: bool = True,
    multiply_by_parameter_scale: bool = True,
    beta1: float | None = None,
    decay_rate: float = 0.8,
    step_offset: int = 0,
    clipping_threshold: float | None = 1.0,
    weight_decay_rate: float | None = None,
    min_dim_size_to_factor: int = 128,
    epsilon1: float = 1e-30,
    dtype_momentum: Any = "float32",
) -> optax.GradientTransformation:
    return optax.adafactor(
        learning_rate,
        min_dim_size_to_factor,
        decay_rate,
        step_offset,
        multiply_by_parameter_scale,
        clipping_threshold,
        beta1,
        dtype_momentum,
        weight_decay_rate,
        epsilon1,
        factored,
    )


# The table of `docs/legacy-checkpoints.md`, with the names and defaults of `flax.optim`.
EQUALS: dict[str, Any] = {
    "GradientDescent": lambda learning_rate: optax.sgd(learning_rate),
    "Momentum": lambda learning_rate, beta=0.9, weight_decay=0.0, nesterov=False: optax.chain(
        optax.add_decayed_weights(weight_decay), optax.sgd(learning_rate, beta, nesterov)
    ),
    "Adam": lambda learning_rate, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0: optax.adamw(
        learning_rate, beta1, beta2, eps, weight_decay=weight_decay
    ),
    "LAMB": lambda learning_rate, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-6: optax.lamb(
        learning_rate, beta1, beta2, eps, weight_decay=weight_decay
    ),
    "LARS": lambda learning_rate, beta=0.9, trust_coefficient=0.001, eps=0.0, nesterov=False: (
        optax.lars(
            learning_rate,
            trust_coefficient=trust_coefficient,
            eps=eps,
            momentum=beta,
            nesterov=nesterov,
        )
    ),
    # an `eps` that only prevents a division by zero
    "Adagrad": lambda learning_rate, eps=1e-8: optax.adagrad(
        learning_rate, initial_accumulator_value=0.0, eps=0.0
    ),
    "RMSProp": lambda learning_rate, beta2=0.9, eps=1e-8, centered=False: optax.rmsprop(
        learning_rate, beta2, eps, eps_in_sqrt=False, centered=centered
    ),
    # the decay is AdamW's, not that of `optax.adadelta`
    "Adadelta": lambda learning_rate, rho=0.9, eps=1e-6, weight_decay=0.0: decayed(
        optax.scale_by_adadelta(rho, eps), weight_decay, learning_rate
    ),
    "AdaBelief": lambda learning_rate, beta1=0.9, beta2=0.999, eps=1e-16, weight_decay=0.0: decayed(
        optax.scale_by_belief(beta1, beta2, eps, eps_root=eps), weight_decay, learning_rate
    ),
    "Adafactor": adafactor,
}


def equal_of(name: str, **hyper_params: Any) -> OptimizerDef:
    constructor = EQUALS[name]
    constructor.__name__ = name.lower()  # what definitions call it
    return wrap_optax_optimizer(constructor)(**hyper_params)


def definition_of(case: dict[str, Any]) -> OptimizerDef:
    spec = IN_032.get(case["id"], case.get("constructor"))
    definition = build(spec)
    if "focus" in case:
        return MultiOptimizer((g.build({"$traversal": case["focus"]}, None), definition))
    return definition


def build(spec: Any) -> OptimizerDef:
    match spec:
        case {"$call": "MultiOptimizer", "args": pairs}:
            parts = [pair["$pair"] for pair in pairs]
            return MultiOptimizer(*[(g.build(what, None), build(how)) for what, how in parts])
        case {"$call": name}:
            given = {key: _plain(value) for key, value in spec.get("kwargs", {}).items()}
            if given.get("learning_rate", 0.0) is None:  # each step was given one
                given["learning_rate"] = 0.5
            if name == "LARS" and given.get("weight_decay"):
                # It has no equal; its state can go on under Optax's own rule.
                lars: OptimizerDef = opt_optax_bridge.lars(momentum=given.pop("beta"), **given)
                return lars
            return equal_of(name, **given)
    raise ValueError(spec)


def _plain(value: Any) -> Any:
    return value["$dtype"] if isinstance(value, dict) else value


def case_of(entry: dict[str, Any]) -> g.Case:
    return g.load(f"{entry['family']}/{entry['id']}", g.LEGACY)


def bytes_of(entry: dict[str, Any]) -> bytes:
    return Path(g.FOLDER / entry["checkpoint"]["file"]).read_bytes()


def restore(entry: dict[str, Any], optimizer: Optimizer, source: Any) -> Optimizer:
    spec = IN_032.get(entry["id"], entry.get("constructor"))
    return restore_legacy(optimizer, source, written_by=writers(spec, optimizer))


def writers(spec: Any, optimizer: Optimizer) -> str | dict[str, str]:
    """The class, or by the names of the groups the classes of a `MultiOptimizer`."""
    name: str = spec["$call"]
    definition = optimizer.optimizer_def
    if not isinstance(definition, MultiOptimizer):
        return name
    groups = definition.split(optimizer)
    if name != "MultiOptimizer":  # of a focus
        return dict.fromkeys(groups, name)
    names = [pair["$pair"][1]["$call"] for pair in spec["args"]]
    return dict(zip(groups, names, strict=True))


def last_entry(entry: dict[str, Any]) -> g.Flat:
    """What the library had when it wrote the checkpoint."""
    case = case_of(entry)
    if entry["kind"] != "resume":
        return g.entry(case, len(case.grads))
    return g.flatten(read_legacy(bytes_of(entry)))  # there is no other record of it


def assert_holds(restored: Optimizer, recorded: g.Flat) -> None:
    """Parameters, step, and each array of the recorded state, once, in its field, bit for bit."""
    found = g.flatten(to_state_dict({"target": restored.target, "state": restored.state}))
    for path, value in recorded.items():
        if path.startswith("target/") or path == "state/step":
            assert_same_bits(found.pop(path), value)
    steps = [found.pop(path) for path in list(found) if path.endswith("/count")]
    assert all(int(step) == int(recorded["state/step"]) for step in steps)
    for path, value in recorded.items():
        if not path.startswith("state/param_states/") or value is None:
            continue
        *names, field = path.removeprefix("state/param_states/").split("/")
        if field == "m" and value.shape == (1,):
            continue  # not in use
        ends = [f"/{name}/{'/'.join(names)}" for name in FIELDS[field]]
        [place] = [p for p in found if any(p.endswith(end) for end in ends)]
        assert_same_bits(found.pop(place), -value if is_lars(restored) else value)
    assert [path for path, value in found.items() if np.shape(value) != (1,)] == []


def assert_same_bits(found: Any, recorded: Any) -> None:
    """NaN of one kind is not NaN of another."""
    assert (np.shape(found), found.dtype) == (np.shape(recorded), recorded.dtype)
    assert np.asarray(found).tobytes() == np.asarray(recorded).tobytes()


def is_lars(restored: Optimizer) -> bool:
    """Whether the momentum is that of LARS: Optax keeps it as the update, which is negative."""
    recipe = getattr(restored.optimizer_def, "recipe", None)
    return recipe is not None and recipe.name == "lars"


# flax.optim

RESTORED = [e for e in FLAX if e.get("checkpoint") and e["id"] not in REFUSED]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "entry", [e for e in RESTORED if "_032" not in e["id"]], ids=lambda e: e["id"]
)
def test_flax_optim_restores_bit_for_bit(entry: dict[str, Any]) -> None:
    optimizer = definition_of(entry).create(case_of(entry).params)
    assert_holds(restore(entry, optimizer, bytes_of(entry)), last_entry(entry))


@pytest.mark.sample(1)
@pytest.mark.parametrize("entry", [e for e in FLAX if "_032" in e["id"]], ids=lambda e: e["id"])
def test_flax_optim_032_restores_bit_for_bit(entry: dict[str, Any]) -> None:
    """Until 0.3.2 a `MultiOptimizer` wrote a list of states; here in the order of joined paths."""
    case = case_of(entry)
    recorded = g.entry(case, len(case.grads))
    optimizer = definition_of(entry).create(case.params)
    if "Multi" in entry["id"]:
        groups = [
            sorted(p for p in paths(case.params) if p.endswith(e)) for e in ("kernel", "bias")
        ]
        recorded = in_one_state(recorded, groups)
    assert_holds(restore(entry, optimizer, bytes_of(entry)), recorded)


def paths(tree: Any) -> list[str]:
    return list(g.flatten(to_state_dict(tree)))


def in_one_state(recorded: g.Flat, groups: list[list[str]]) -> g.Flat:
    moved = {p: v for p, v in recorded.items() if p.startswith("target/")}
    moved["state/step"] = recorded["state/0/step"]
    for path, value in recorded.items():
        match path.split("/"):
            case ["state", i, "param_states", j, field]:
                moved[f"state/param_states/{groups[int(i)][int(j)]}/{field}"] = value
    return moved


@pytest.mark.parametrize("entry", [e for e in FLAX if e["id"] in REFUSED], ids=lambda e: e["id"])
def test_what_has_no_equal_is_refused_with_the_reason(entry: dict[str, Any]) -> None:
    name = REFUSED[entry["id"]]
    contents = read_legacy(bytes_of(entry))
    params = contents.get("target", {"w": np.ones(2, np.float32)})
    optimizer = equal_of("Adam", learning_rate=0.1).create(params)
    with pytest.raises(LoadError, match=name):
        restore_legacy(optimizer, bytes_of(entry), written_by="Adam")


def test_dynamic_scale_goes_where_the_message_says() -> None:
    for entry in FLAX:
        if entry["kind"] == "dynamic_scale":
            scale = flax.serialization.from_state_dict(DynamicScale(), read_legacy(bytes_of(entry)))
            with np.load(g.FOLDER / entry["file"], allow_pickle=False) as recorded:
                assert scale.scale == recorded["scale"][-1]
                assert scale.fin_steps == recorded["fin_steps"][-1]


# Training goes on.

# bfloat16: Optax corrects the bias in float32, Flax in bfloat16, where 0.999 is 1. LARS with weight
# decay: another trust ratio.
NOT_AT_ALL = {"Adam_bf16", "Adam_bf16_b2_0_9", "LAMB_bf16", "LAMB_bf16_b2_0_9"}
NOT_AT_ALL |= {"LARS_1_linen", "LARS_frozen_lr_overrides"}
GOES_ON = [
    entry
    for entry in FLAX
    if entry["kind"] == "trajectory"
    and "WeightNorm" not in entry["id"]
    and entry["id"] not in NOT_AT_ALL
    and entry["family"] == "flax_optim"
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("entry", GOES_ON, ids=lambda e: e["id"])
def test_training_continues_as_under_flax_optim(entry: dict[str, Any]) -> None:
    """From Flax's own numbers after half of the steps, Flax's own numbers follow."""
    case, definition = case_of(entry), definition_of(entry)
    first = len(case.grads) // 2
    flat = g.entry(case, first) | {path: {} for path in entry.get("empty_dict_keys", [])}
    optimizer = restore(entry, definition.create(case.params), g.unflatten(flat))
    tolerance = g.BFLOAT16 if case.is_bfloat16 else g.OP_BY_OP
    for t in range(first, len(case.grads)):
        given = g.overrides(case, definition, t)
        optimizer = optimizer.apply_gradient(case.grads[t], **given)
        expected = {p: v for p, v in g.entry(case, t + 1).items() if p.startswith("target/")}
        found = g.flatten({"target": to_state_dict(optimizer.target)})
        assert g.deviations(found, expected, tolerance) == [], f"after {t + 1} steps"


# TrainState


def train_state(name: str) -> Any:
    return optax.adam(0.01) if "adam" in name else optax.sgd(0.1, momentum=0.9, nesterov=True)


def in_todays_layout(recorded: g.Flat) -> g.Flat:
    """With the names of fields instead of their numbers, and under today's heads."""
    fields = {"adam": ["count", "mu", "nu"], "sgd": ["trace"]}
    moved = {}
    for path, value in recorded.items():
        match path.split("/"):
            case ["opt_state", "0", "values", i, *rest]:
                kind = "sgd" if "opt_state/0/values/1" not in "".join(recorded) else "adam"
                path = "/".join(["opt_state", "0", fields[kind][int(i)], *rest])
        path = path.replace("opt_state/", "state/param_states/").replace("params/", "target/")
        moved["state/step" if path == "step" else path] = value
    return moved


@pytest.mark.sample(1)
@pytest.mark.parametrize("entry", TRAIN_STATES, ids=lambda e: e["id"])
def test_train_states_restore_and_continue(entry: dict[str, Any]) -> None:
    case = case_of(entry)
    optimizer = OptaxWrapper(train_state(entry["id"])).create(case.params)
    restored = restore_legacy(optimizer, bytes_of(entry))
    numbers = {p: v for p, v in case.trajectory.items() if v.dtype.kind in "fi"}
    last = in_todays_layout({path: series[-1] for path, series in numbers.items()})
    assert g.deviations(g.flatten(restored.state_dict()), last, g.EXACT) == []
    half = entry["steps"] // 2
    before = in_todays_layout({path: series[half] for path, series in numbers.items()})
    resumed = restore_legacy(optimizer, g.unflatten(before))
    for t in range(half, entry["steps"]):
        resumed = resumed.apply_gradient(case.grads[t])
    assert g.deviations(g.flatten(resumed.state_dict()), last, g.OP_BY_OP) == []


# T5X

MOVED = {
    "t5x/noisy_sgd_0": ("param_states/1/", "param_states/0/"),
    "t5x/wrapper_inject_hyperparams": ("", ""),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [*WRAPPED, *GROUPS])
def test_t5x_restores_bit_for_bit(name: str) -> None:
    """`noisy_sgd` and `inject_hyperparams` have moved since: they are moved along."""
    case = g.load(name, g.WRAPPED if name in WRAPPED else g.GROUPS)
    old_randomness = jax.threefry_partitionable(False) if "dpsgd" in name else None
    with old_randomness or contextlib.nullcontext():
        definition = g.build(case.spec, g.OURS)
        if name in GROUPS:
            definition.set_param_axes(case.param_axes)
        optimizer = definition.create(case.params)
    restored = restore_legacy(optimizer, g.FOLDER / case.index["checkpoint"]["file"])
    recorded = g.entry(case, len(case.grads))
    if name in MOVED:
        old, new = MOVED[name]
        recorded = {path.replace(old, new) if old else path: v for path, v in recorded.items()}
    if name == "t5x/wrapper_inject_hyperparams":
        inner = "state/param_states"
        count = recorded[f"{inner}/count"]
        recorded[f"{inner}/hyperparams_states/learning_rate/count"] = count
    assert g.deviations(g.flatten(restored.state_dict()), recorded, g.EXACT) == []


def test_every_checkpoint_is_tried() -> None:
    """None of the files that the real libraries wrote is left out."""
    tried = {Path(e["checkpoint"]["file"]).name for e in FLAX + TRAIN_STATES if "checkpoint" in e}
    tried |= {Path(g.load(n).index["checkpoint"]["file"]).name for n in WRAPPED}
    tried |= {Path(g.load(n, g.GROUPS).index["checkpoint"]["file"]).name for n in GROUPS}
    assert tried == {path.name for path in (g.FOLDER / "checkpoints").iterdir()}
    assert len(tried) == 70


# Adafactor of flax.optim, and ours


RULE = (".*", HEURISTIC_RULE)


def test_adafactor_of_flax_restores_into_ours() -> None:
    """At rank 3 Flax factored the two largest axes and scaled the whole; a rule says so to ours."""
    entry = next(e for e in FLAX if e["id"] == "Adafactor_1")
    case = case_of(entry)
    assert case.params["cube"]["kernel"].shape == (4, 9, 10)
    given = entry["constructor"]["kwargs"]
    unfactored = Adafactor(**given, factor_map=HParamMap([("cube/kernel", None), RULE]))
    with pytest.raises(RestoreError, match="cube/kernel/v_row: shape"):
        restore_legacy(unfactored.create(case.params), bytes_of(entry))
    cube = (FactorDim.NONE, FactorDim.ROW, FactorDim.COLUMN)
    rules = HParamMap([("cube/kernel", cube), RULE])
    optimizer = Adafactor(**given, factor_map=rules).create(case.params)
    restored = restore_legacy(optimizer, bytes_of(entry))
    recorded = g.entry(case, len(case.grads))
    assert g.deviations(g.flatten(restored.state_dict()), recorded, g.EXACT) == []
