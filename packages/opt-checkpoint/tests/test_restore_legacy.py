"""Restoring legacy state dicts: which layouts there are, what is refused, and with which words."""

import contextlib
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import flax.serialization
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import optax
import pytest
from opt_checkpoint import named_state, restore_legacy
from opt_checkpoint.errors import LoadError, VersionError
from opt_core import MultiOptimizer, Optimizer
from opt_core.errors import OptimizerError, RestoreError
from opt_optax_bridge import OptaxWrapper

pytestmark = pytest.mark.usefixtures("optax_promotion")

STEP = 7


def params() -> Any:
    return {"layer": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}


def saved(*fields: str, head: str = "flax.optim") -> dict[str, Any]:
    """What an optimizer of `flax.optim` with these fields wrote, in one of the layouts."""

    def entry(shape: tuple[int, ...], start: int) -> dict[str, np.ndarray]:
        return {f: np.full(shape, start + i, np.float32) for i, f in enumerate(fields)}

    target = {"layer": {"kernel": np.full((2, 3), 5, np.float32), "bias": np.zeros(3, np.float32)}}
    states = {"layer": {"kernel": entry((2, 3), 1), "bias": entry((3,), 3)}}
    part = {"target": target, "state": {"step": np.int32(STEP), "param_states": states}}
    return {"version": 3, "optimizer": part} if head == "t5x" else part


def adam(rate: Any = 0.1) -> Optimizer:
    return opt.adamw(rate, weight_decay=0.0).create(params())


EMAS = ("grad_ema", "grad_sq_ema")


def test_the_count_of_a_schedule_is_the_step() -> None:
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    named = named_state(restore_legacy(adam(schedule), saved(*EMAS), written_by="Adam"))
    assert [int(leaf) for name, leaf in named.items() if name.endswith("/count")] == [STEP] * 2


def wrapped(*members: Any) -> Optimizer:
    return OptaxWrapper(optax.chain(*members)).create(params())


def groups() -> Optimizer:
    definition = MultiOptimizer(
        (".*kernel", opt.sgd(0.1, momentum=0.9)),
        (".*bias", OptaxWrapper(optax.adam(0.1))),
        names=["kernels", "biases"],
    )
    return definition.create(params())


def saved_groups() -> dict[str, Any]:
    source = saved("momentum")
    source["state"]["param_states"]["layer"]["bias"] = saved(*EMAS)["state"]["param_states"][
        "layer"
    ]["bias"]
    return source


def listed_groups(other_step: int = STEP) -> dict[str, Any]:
    """As Flax until 0.3.2 wrote groups."""
    source = saved_groups()
    layer = source["state"]["param_states"]["layer"]
    states = {
        str(i): {"step": step, "param_states": {"0": layer[name]}}
        for i, (name, step) in enumerate([("kernel", STEP), ("bias", other_step)])
    }
    return {"target": source["target"], "state": states}


def test_a_list_of_states_is_in_the_order_of_the_components() -> None:
    """`ModelParamTraversal` of Flax 0.3.2 sorted the keys of `flatten_dict`, tuples of strings."""
    names = ("block", "block-1", "block.2", "block 3", "block+", "block0", "10", "2")
    target = {name: {"kernel": np.full(2, i, np.float32)} for i, name in enumerate(names)}
    order = sorted(flax.traverse_util.flatten_dict(target))
    assert order != sorted(order, key="/".join)
    states = [{"momentum": 10 * target[a][b]} for a, b in order]
    source = {"target": target, "state": [{"step": np.int32(3), "param_states": states}]}
    definition = MultiOptimizer((".*", opt.sgd(0.1, momentum=0.9)))
    optimizer = definition.create(jax.tree.map(np.zeros_like, target))
    restored = restore_legacy(optimizer, source, written_by="Momentum")
    named = named_state(restored)
    for name, layer in target.items():
        moment = named[f"state/groups/0/trace/trace/{name}/kernel"]
        np.testing.assert_array_equal(moment, 10 * layer["kernel"])


def frozen_when_saved() -> dict[str, Any]:
    source = saved(*EMAS)
    source["state"]["param_states"]["layer"]["bias"] = None
    return source


def test_nobody_needs_to_say_who_wrote_states_of_optax() -> None:
    plain = wrapped(optax.adam(0.1))
    ours = plain.state_dict()
    state = ours["state"]
    in_train_state = {
        "params": ours["target"],
        "opt_state": state["param_states"],
        "step": state["step"],
    }
    for source in (ours, in_train_state, {"version": 3, "optimizer": ours}):
        restore_legacy(plain, source)
        with pytest.raises(LoadError, match=r"is for restoring .* `flax\.optim`"):
            restore_legacy(plain, source, written_by="Adam")


def test_who_wrote_it_may_be_said() -> None:
    """Adam, LAMB and AdaBelief write the same fields; nothing in the file tells them apart."""
    plain = wrapped(optax.clip(1.0), optax.adamw(0.1))
    restored = restore_legacy(plain, saved(*EMAS), written_by="Adam")
    np.testing.assert_array_equal(restored.state.param_states[1][0].mu["layer"]["kernel"], 1.0)


def test_who_wrote_it_must_be_known_and_right() -> None:
    plain, file = wrapped(optax.adam(0.1)), saved(*EMAS)
    adafactors = saved("v_row", "v_col", "v", "m", head="t5x")
    for match, optimizer, source, by in (
        ("does not say which optimizer wrote it", plain, file, None),
        (r"is Adafactor's: .* into `opt_adafactor\.Adafactor`", plain, adafactors, None),
        ("'Adamw' is not one of GradientDescent, ", plain, file, "Adamw"),
        (r"wrote it \(group `biases`\)", groups(), saved_groups(), {"kernels": "Momentum"}),
        (
            "`others` is not a group of wrapped Optax that trains",
            groups(),
            saved_groups(),
            {"others": "Adam"},
        ),
        ("no groups; pass one name", adam(), file, {"kernels": "Adam"}),
    ):
        with pytest.raises(LoadError, match=match):
            restore_legacy(optimizer, source, written_by=by)


def test_another_definition_than_the_writer() -> None:
    with pytest.raises(RestoreError) as caught:
        restore_legacy(wrapped(optax.adam(0.1)), wrapped(optax.sgd(0.1, momentum=0.9)).state_dict())
    assert str(caught.value).splitlines()[-1] == (
        "Restore into the definition that wrote the file, then change it: `opt_core.regroup`, or "
        "save it and `plan_restore`."
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_state_without_a_place_and_places_without_state() -> None:
    file, momentum = saved(*EMAS), opt.sgd(0.1, momentum=0.9)
    kernels = optax.masked(optax.adam(0.1), {"layer": {"kernel": True, "bias": False}})
    frozen = MultiOptimizer((".*kernel", momentum)).create(params())
    averaged = wrapped(optax.adam(0.1), optax.ema(0.9))
    for match, optimizer, source, by in (
        ("grad_ema: has no place", wrapped(optax.adam(0.1)), file, "AdaBelief"),
        ("1/ema/layer/kernel: the file has nothing for this", averaged, file, "Adam"),
        ("fields momentum; expected grad_ema, grad_sq_ema", adam(), saved("momentum"), "Adam"),
        ("layer/bias/grad_ema: has no place", wrapped(kernels), file, "Adam"),
        ("bias: has no state: frozen when it was saved", adam(), frozen_when_saved(), "Adam"),
        ("that are frozen here: layer/bias", frozen, saved("momentum"), None),
        (r"`state`: 2 states.*this optimizer has 0 groups", adam(), listed_groups(), None),
        ("`state/1/step`: 3, and 7", groups(), listed_groups(3), {"biases": "Adam"}),
    ):
        with pytest.raises(LoadError, match=match):
            restore_legacy(optimizer, source, written_by=by)


_NO_TUPLE = {"name": "X", "fields": {"0": "a"}, "values": {}}


@pytest.mark.parametrize(
    ("contents", "match"),
    [
        ({"weights": 1}, r"expected the keys `target` and `state`.*found weights"),
        ({"version": 3, "optimizer": 5}, "`optimizer`: expected a dict"),
        ({"target": {}, "state": {}}, "`state/step`: expected a non-negative int32, found None"),
        ({"target": {}, "state": {"step": 2**31}}, "expected a non-negative int32, found 2147"),
        ({"target": {"w": "PLACEHOLDER://w"}, "state": {}}, "`target/w`: the array is not in"),
        ({"params": {}, "step": 1, "opt_state": _NO_TUPLE}, "s`: expected a named tuple"),
    ],
)
def test_what_is_no_checkpoint(contents: Any, match: str) -> None:
    with pytest.raises(LoadError, match=match):
        restore_legacy(adam(), contents)
    with pytest.raises(VersionError, match="this is version 4 of T5X"):
        restore_legacy(adam(), {"version": 4, "optimizer": {}})


def _accumulating(every_k: Any) -> Optimizer:
    steps = optax.MultiSteps(optax.sgd(0.1), every_k)
    return OptaxWrapper(steps.gradient_transformation()).create(params())


def test_a_window_that_cannot_end_is_refused() -> None:
    state_dict = _accumulating(4).state_dict()
    states = {**state_dict["state"]["param_states"], "mini_step": np.int32(3)}
    source = {"params": state_dict["target"], "opt_state": states, "step": np.int32(3)}
    assert int(restore_legacy(_accumulating(4), source).state.param_states.mini_step) == 3
    for shorter in (2, 3):
        with pytest.raises(LoadError, match=r"mini_step`: 3 mini-steps.*window is [23]"):
            restore_legacy(_accumulating(shorter), source)
    by_step = restore_legacy(_accumulating(lambda step: 2), source)
    assert int(by_step.state.param_states.mini_step) == 3
    closed = {**source, "opt_state": {**states, "mini_step": np.int32(0)}}
    assert int(restore_legacy(_accumulating(2), closed).state.param_states.mini_step) == 0


def nodes(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        yield tree
        for child in tree.values():
            yield from nodes(child)


@pytest.mark.parametrize("head", ["flax.optim", "t5x"])
def test_mutated_state_dicts_raise_typed_errors_only(head: str) -> None:
    """Each entry removed, or with something else in its place."""
    targets: list[tuple[Optimizer, Any]] = [
        (adam(), "Adam"),
        (wrapped(optax.adam(0.1)), "Adam"),
        (groups(), {"kernels": "Momentum", "biases": "Adam"}),
    ]
    wrong: list[Any] = [None, -5, "x", {}, [], np.ones(3, np.float32), {"0": {"step": 1}}]
    for i, node in enumerate(nodes(saved(*EMAS, head=head))):
        for key, value in itertools.product(node, [*wrong, Ellipsis]):
            source = saved(*EMAS, head=head)
            place = next(itertools.islice(nodes(source), i, None))
            del place[key]
            if value is not Ellipsis:
                place[key] = value
            with contextlib.suppress(OptimizerError):
                restore_legacy(targets[i % 3][0], source, written_by=targets[i % 3][1])
