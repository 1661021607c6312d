"""An override of a transformation that is already built says which line makes it possible."""

from typing import Any

import jax
import jax.numpy as jnp
import opt_accumulate
import opt_matrix
import opt_optax_bridge as opt
import optax
import pytest
from opt_core.errors import HyperParamError
from opt_optax_bridge import OptaxWrapper, wrap_optax_optimizer

PARAMS = {"b": jnp.ones(3), "w": jnp.eye(3)}
SGD: Any = opt.sgd(0.1)  # Optax declares a transformation where this goes
MATRICES = opt_matrix.Matrices.by_rank2()

CASES: dict[str, tuple[Any, str, Any, Any]] = {
    "opt_matrix.muon": (
        opt_matrix.muon(0.1, matrices=MATRICES),
        "wrap_optax_optimizer(opt_matrix.muon)(...)",
        wrap_optax_optimizer(opt_matrix.muon)(0.1, matrices=MATRICES),
        opt_matrix.muon(0.5, matrices=MATRICES),
    ),
    "opt_accumulate.MultiSteps": (
        opt_accumulate.MultiSteps(optax.sgd(0.1), 1),
        "wrap_optax_optimizer(opt_accumulate.MultiSteps)(...)",
        wrap_optax_optimizer(opt_accumulate.MultiSteps)(opt.sgd(0.1), 1),
        opt_accumulate.MultiSteps(optax.sgd(0.5), 1),
    ),
    "optax.MultiSteps": (
        optax.MultiSteps(optax.sgd(0.1), 1),
        "wrap_optax_optimizer(optax.MultiSteps)(...)",
        wrap_optax_optimizer(optax.MultiSteps)(SGD, 1),
        optax.MultiSteps(optax.sgd(0.5), 1),
    ),
    "optax.adamw": (
        optax.adamw(0.1),
        "`opt_optax_bridge.adamw(...)` for `optax.adamw(...)`",
        opt.adamw(0.1),
        optax.adamw(0.5),
    ),
}
SLOW = ("opt_matrix.muon", "optax.MultiSteps")


@pytest.mark.parametrize(
    ("built", "line", "definition", "expected"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (name in SLOW), id=name)
        for name, case in CASES.items()
    ],
)
def test_the_line_works(built: Any, line: str, definition: Any, expected: Any) -> None:
    with pytest.raises(HyperParamError) as caught:
        OptaxWrapper(built).create(PARAMS).apply_gradient(PARAMS, learning_rate=0.5)
    assert line in str(caught.value)
    stepped = definition.create(PARAMS).apply_gradient(PARAMS, learning_rate=0.5)
    wanted = OptaxWrapper(expected).create(PARAMS).apply_gradient(PARAMS)
    for leaf, expected_leaf in zip(
        jax.tree.leaves(stepped.target), jax.tree.leaves(wanted.target), strict=True
    ):
        assert jnp.allclose(leaf, expected_leaf, rtol=1e-5, atol=1e-6)
