"""The compiled step of a wrapped optimizer is that of Optax, instruction for instruction.

XLA's optimized program is read as a graph: every instruction gets a hash of its opcode, shape,
layout, attributes and constants, of the computations that it calls, and of its operands; parameters
go by the leaf that they are. Names and source lines play no part. Two results with one hash are
computed by the same graph.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import opt_optax_bridge
import optax
import pytest
from opt_core import path_names
from opt_optax_bridge import OptaxWrapper

pytestmark = pytest.mark.usefixtures("optax_promotion")

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "lamb": lambda: optax.lamb(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=4),
    "chain with a schedule": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE)
    ),
}


def make_params() -> dict[str, jax.Array]:
    return {"b": jnp.ones(8), "w": jnp.ones((4, 8))}


class Instruction(NamedTuple):
    opcode: str
    shape: str
    operands: list[str]
    literal: str  # what stands between the brackets where that is no operand
    attributes: str
    called: list[str]


class Module:
    """The text of an HLO module, as graphs."""

    def __init__(self, text: str, parameters: list[str]) -> None:
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.roots: dict[str, str] = {}
        self.parameters = parameters
        self._known: dict[tuple[str, str], str] = {}
        name = ""
        for line in text.splitlines():
            if opened := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                name = opened[2]
                self.computations[name] = {}
                if opened[1]:
                    self.entry = name
            elif found := re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*)$", line):
                self.computations[name][found[2]] = _parse(found[3])
                if found[1]:
                    self.roots[name] = found[2]

    def results(self) -> list[str]:
        """One hash per result of the program."""
        root = self.computations[self.entry][self.roots[self.entry]]
        assert root.opcode == "tuple"
        return [self.hash(self.entry, operand) for operand in root.operands]

    def hash(self, computation: str, name: str) -> str:
        key = (computation, name)
        if key not in self._known:
            parts = list(self._parts(computation, self.computations[computation][name]))
            self._known[key] = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        return self._known[key]

    def _parts(self, computation: str, instruction: Instruction) -> Iterator[str]:
        yield instruction.opcode
        yield instruction.shape
        yield instruction.attributes
        if instruction.opcode == "parameter" and computation == self.entry:
            yield self.parameters[int(instruction.literal)]
        else:
            yield instruction.literal
        for called in instruction.called:
            yield self.hash(called, self.roots[called])
        for operand in instruction.operands:
            yield self.hash(computation, operand)


def _parse(text: str) -> Instruction:
    shape, rest = _split_shape(text)
    opcode, rest = rest.split("(", 1)
    end = _closing(rest)
    inside, attributes = rest[:end], rest[end + 1 :]
    operands = re.findall(r"%([\w.\-]+)", inside)
    attributes = re.sub(
        r",? ?(metadata|frontend_attributes|backend_config)=\{[^}]*\}", "", attributes
    )
    attributes = re.sub(r", control-predecessors=\{[^}]*\}", "", attributes)
    called = re.findall(r"%([\w.\-]+)", attributes)
    attributes = re.sub(r"%[\w.\-]+", "%", attributes)
    return Instruction(opcode, shape, operands, "" if operands else inside, attributes, called)


def _split_shape(text: str) -> tuple[str, str]:
    end = _closing(text[1:]) + 2 if text.startswith("(") else text.index(" ")
    return text[:end], text[end:].strip()


def _closing(text: str) -> int:
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position
    raise ValueError(text)


def compiled(function: Callable[..., Any], *args: Any) -> Module:
    """The optimized program; its parameters are named by the paths of the arguments' leaves."""
    text = str(jax.jit(function, keep_unused=True).lower(*args).compile().as_text())
    paths = ["/".join(path_names(path)) for path, _ in jax.tree_util.tree_leaves_with_path(args)]
    return Module(text, [path.removeprefix("0/") for path in paths])


def wrapped_and_raw(
    wrapper: OptaxWrapper, rebuild: Callable[..., Any], *rates: float
) -> tuple[Module, Module]:
    """A step of ours and of Optax, with the leaves of their arguments in one order."""
    optimizer = wrapper.create(make_params())
    names = ["learning_rate"] if rates else []

    def ours(optimizer: Any, grads: Any, *rates: Any) -> Any:
        return optimizer.apply_gradient(grads, **dict(zip(names, rates, strict=True)))

    def theirs(raw: Any, grads: Any, *rates: Any) -> Any:
        tx = rebuild(*rates)
        state, params = raw["state"]["param_states"], raw["target"]
        updates, state = tx.update(grads, state, params)
        return {"state": {"param_states": state}, "target": optax.apply_updates(params, updates)}

    raw = {
        "state": {"param_states": optimizer.state.param_states},
        "target": optimizer.target,
    }
    return compiled(ours, optimizer, make_params(), *rates), compiled(
        theirs, raw, make_params(), *rates
    )


def assert_same_program(ours: Module, theirs: Module) -> None:
    step, *results = ours.results()
    assert results == theirs.results()
    assert step not in results
    # The step counter: the argument, its increment, its end.
    added = len(ours.computations[ours.entry]) - len(theirs.computations[theirs.entry])
    assert 0 < added <= 6


@pytest.mark.sample(2)
@pytest.mark.parametrize("build", TRANSFORMATIONS.values(), ids=list(TRANSFORMATIONS))
def test_the_program_is_that_of_optax(build: Callable[[], Any]) -> None:
    tx = build()
    assert_same_program(*wrapped_and_raw(OptaxWrapper(tx), lambda: tx))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["adamw", "lamb", "adafactor"])
def test_with_a_run_time_learning_rate_too(name: str) -> None:
    """As if Optax were called inside of the compiled function with the argument."""
    arguments = {"min_dim_size_to_factor": 4} if name == "adafactor" else {}
    wrapped, constructor = getattr(opt_optax_bridge, name), getattr(optax, name)

    def rebuild(rate: Any) -> Any:
        return constructor(rate, **arguments)

    assert_same_program(*wrapped_and_raw(wrapped(0.5, **arguments), rebuild, 1e-3))


def test_a_chain_of_definitions_is_the_chain_of_optax() -> None:
    chained = opt_optax_bridge.chain(
        opt_optax_bridge.clip_by_global_norm(1.0), opt_optax_bridge.adamw(0.5)
    )

    def rebuild(rate: Any = 0.5) -> Any:
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))

    assert_same_program(*wrapped_and_raw(chained, rebuild))
    assert_same_program(*wrapped_and_raw(chained, rebuild, 1e-3))


def program(tx: Any) -> list[str]:
    optimizer = OptaxWrapper(tx).create(make_params())
    return compiled(lambda o, g: o.apply_gradient(g), optimizer, make_params()).results()


def test_the_comparison_sees_numbers_and_order_and_nothing_else() -> None:
    base = program(optax.adamw(1e-3))
    assert program(optax.adamw(1e-3)) == base
    step, count, *moments, b, w = range(len(base))
    del step
    other_rate = program(optax.adamw(2e-3))
    assert [other_rate[i] == base[i] for i in (count, *moments)] == [True] * (1 + len(moments))
    assert other_rate[b] != base[b]
    assert other_rate[w] != base[w]
    assert len({*moments}) == 4
    assert len({base[i] for i in moments}) == 4, "mu and nu are not distinguished"
    one = program(optax.chain(optax.clip(1.0), optax.scale(0.5)))
    two = program(optax.chain(optax.scale(0.5), optax.clip(1.0)))
    assert sorted(one) != sorted(two)
