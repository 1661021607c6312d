"""mypy and pyright find what is wrong in a user's code, and nothing where it is right."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import opt_core
import opt_optax_bridge
import opt_partition
import pytest

RIGHT = """
import jax
import jax.numpy as jnp
import opt_optax_bridge as opt
import opt_partition
import optax  # type: ignore[import-untyped]
from opt_core import FROZEN, MultiOptimizer, Optimizer, describe, freeze, regroup
from opt_optax_bridge import t5x

Params = dict[str, jax.Array]
params: Params = {"w": jnp.ones(2), "b": jnp.zeros(1)}
grads: Params = jax.tree.map(jnp.ones_like, params)
schedule = optax.linear_schedule(1e-3, 0.0, 10)
definition = opt.adamw(1e-3, weight_decay=0.1)
optimizer = definition.create(params)
optimizer = optimizer.apply_gradient(grads, learning_rate=0.1, weight_decay=jnp.float32(0.1))
optimizer = optimizer.apply_gradient(grads, learning_rate=schedule)
optimizer = optimizer.apply_gradient(grads, **opt.scale_learning_rate(optimizer, 0.5))
weight: jax.Array = optimizer.params["w"]
sgd = opt.sgd(schedule, momentum=0.9, nesterov=True, accumulator_dtype=jnp.bfloat16).create(params)
searched = opt.lbfgs().create(params)
searched = searched.apply_gradient(grads, value=1.0, grad=grads, value_fn=lambda params: 1.0)
masked = opt.masked(opt.scale_by_adam(b1=0.8), {"w": True, "b": False})
parts = opt.chain(opt.clip_by_global_norm(1.0), optax.scale(2.0), masked, last=opt.adam(1e-3))
whole = parts.create(params).apply_gradient(grads, max_norm=0.5, **{"last.learning_rate": 0.1})
rules = [("matrices", "w", opt.adamw(1e-3)), ("vectors", "b", opt.sgd(0.1))]
groups = MultiOptimizer.from_rules(rules).create(params)
by_group = {"matrices": {"learning_rate": 0.1}}
groups = groups.apply_gradient(grads, weight_decay=0.1, group_overrides=by_group, missing="ignore")
pairs = MultiOptimizer(("w", opt.adamw(1e-3)), ("b", FROZEN))
bias = MultiOptimizer.from_rules([("b", opt.lion(1e-3))], rest=FROZEN).create(params)
frozen, plan = freeze(optimizer, "b")
weight = plan.apply().params["w"] + regroup(frozen, opt.sgd(0.1))[0].params["w"]
print(describe(groups), opt.resolve_hyper_params(groups), optimizer.step + 1)
tx = opt.as_transformation(MultiOptimizer.from_rules(rules))
updates, state = tx.update(grads, tx.init(params), params)
for tx_or_definition in (tx, optax.adam(1e-3), definition):
    opt_partition.explain(tx_or_definition, params, {"w": ("embed",), "b": None})


def train_step(optimizer: Optimizer[Params], grads: Params, rate: jax.Array) -> Optimizer[Params]:
    return optimizer.apply_gradient(grads, learning_rate=rate)


def total(optimizer: Optimizer) -> jax.Array:
    return jnp.sum(optimizer.params["w"])


@opt.wrap_optax_optimizer
def of_my_own(learning_rate: float, clip: float = 1.0) -> object:
    return optax.chain(optax.clip(clip), optax.sgd(learning_rate))


values = {"learning_rate": 0.1, "b1": 0.8}
optimizer = optimizer.apply_gradient(grads, **values)
in_a_list = [opt.clip(1.0), opt.adamw(1e-3)]
opt.chain(in_a_list).create(params)
train_step(groups, grads, jnp.float32(0.1))
train_step(of_my_own(0.1).create(params), grads, jnp.float32(0.1))
mask = {"w": True, "b": False}
some = opt.masked(opt.adam(1e-3), mask).create(params)
some = some.apply_gradient(grads, learning_rate=0.1, **{"inner.b1": 0.8})
guarded = opt.apply_if_finite(opt.flatten(opt.momo()), 3).create(params)
guarded = guarded.apply_gradient(grads, value=1.0, learning_rate=0.1)
from_t5x: t5x.Optimizer = t5x.adamw(schedule, weight_decay=0.1).create(params)
old = t5x.adamw(schedule, weight_decay=0.1).create(params)
old = train_step(old.apply_gradient(grads, learning_rate=0.1), grads, jnp.float32(0.1))
older = t5x.chain([optax.clip(1.0), optax.adam(1e-3)]).create(params)
older.apply_gradient(grads, learning_rate=0.1)
"""

# Each is wrong, after what is right above.
WRONG = """
opt.adamww(1e-3)
opt.adamw("fast")
opt.adamw(learning_rat=1e-3)
opt.adamw(1e-3, b1="0.9")
opt.chain(1.0)
opt.masked(0.1, {"w": True})
optimizer.apply_gradient()
optimizer.apply_gradient(grads, learning_rat=0.1)
optimizer.apply_gradient(grads, learning_rate="0.1")
optimizer.apply_gradient(grads, nesterov=True)
sgd.apply_gradient(grads, weight_decay=0.1)
opt.polyak_sgd().create(params).apply_gradient(grads, valeu=1.0)
optimizer.apply_gradients(grads)
optimizer.params.kernel
definition.creat(params)
opt.as_transformation(optimizer)
opt.resolve_hyper_params(definition)
opt.scale_learning_rate(optimizer, "half")
opt.wrap_optax_optimizer(1.0)
of_my_own(learning_rat=0.1)
MultiOptimizer.from_rules(rules, rest="frozen")
MultiOptimizer.from_rules([("w", 1e-3)])
regroup(optimizer, opt.adamw)
regroup(frozen, opt.sgd(0.1))[0].params.kernel
MultiOptimizer([("w", opt.adamw(1e-3)), ("b", "frozen")])
opt_partition.explain(1.0, params, None)
train_step(opt.adam(1e-3).create([jnp.ones(2)]), grads, jnp.float32(0.1))
opt.masked(opt.sgd(0.1), mask).create(params).apply_gradient(grads, b1=0.1)
some.apply_gradient(grads, learning_rat=0.1)
opt.apply_if_finite(opt.adam(1e-3), max_errors=3)
t5x.adamww(1e-3)
t5x.adamw(learning_rat=1e-3)
t5x.wrap_optax_optimizer(1.0)
t5x.adamw(1e-3).create(params).apply_gradient(grads, learning_rat=0.1)
t5x.MultiOptimizer.of_nothing()
""".strip().splitlines()

PACKAGES = {
    str(Path(str(p.__file__)).parents[1]) for p in (opt_core, opt_optax_bridge, opt_partition)
}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.joinpath("user.py").write_text(RIGHT + "\n".join(WRONG) + "\n")
        yield folder


def run(*command: str, folder: Path) -> str:
    env = {**os.environ, "MYPYPATH": os.pathsep.join(PACKAGES)}
    done = subprocess.run(command, cwd=folder, env=env, check=False, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr  # it has found something
    return done.stdout


def mypy(folder: Path) -> dict[int, str]:
    options = ["--strict", "--no-error-summary", "--hide-error-context", "--cache-dir=cache"]
    printed = run(sys.executable, "-m", "mypy", *options, "user.py", folder=folder)
    found = re.findall(r"^user\.py:(\d+): (error: .*)$", printed, re.MULTILINE)
    return {int(line): message for line, message in found}


def pyright(folder: Path) -> dict[int, str]:
    settings = {"typeCheckingMode": "standard", "extraPaths": sorted(PACKAGES)}
    folder.joinpath("pyrightconfig.json").write_text(json.dumps(settings))
    options = ["--outputjson", "--pythonpath", sys.executable]
    printed = run(sys.executable, "-m", "pyright", *options, "user.py", folder=folder)
    found = json.loads(printed)["generalDiagnostics"]
    errors = [entry for entry in found if entry["severity"] == "error"]
    return {entry["range"]["start"]["line"] + 1: entry["message"] for entry in errors}


@pytest.mark.slow
@pytest.mark.parametrize("checker", [mypy, pyright], ids=lambda checker: checker.__name__)
def test_every_wrong_line_is_found_and_no_right_one(checker: object, folder: Path) -> None:
    assert callable(checker)
    found = checker(folder)
    first = RIGHT.count("\n") + 1
    right = {line: message for line, message in found.items() if line < first}
    assert not right
    missed = [code for line, code in enumerate(WRONG, start=first) if line not in found]
    assert not missed
