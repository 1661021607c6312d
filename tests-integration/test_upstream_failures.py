"""What the usual ways of specs for optimizer state give where it is not shaped like the parameters.

Beside each stands what this package gives. T5X's table of rules by type is no longer installable:
it knew 20 of Optax's 63 types of state, and raised for `FactoredState`, `MuonState` and
`GaLoreState`; for sm3 it looked for the parameters' paths below a list and raised, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec
from jax.tree_util import keystr
from opt_partition import derive_logical_axes
from packaging.version import Version

optax: Any = importlib.import_module("optax")
contrib: Any = importlib.import_module("optax.contrib")

SHAPES = {"kernel": (16, 24), "square": (16, 16), "bias": (24,)}
AXES = {
    "kernel": PartitionSpec("embed", "mlp"),
    "square": PartitionSpec("heads", "kv"),
    "bias": PartitionSpec("mlp"),
}
SIZES = {"embed": 16, "mlp": 24, "heads": 16, "kv": 16}


def params() -> Any:
    return {name: jnp.ones(shape) for name, shape in SHAPES.items()}


def adafactor() -> Any:
    return optax.adafactor(1e-2, min_dim_size_to_factor=8)


def galore() -> Any:
    if not hasattr(contrib, "galore"):
        pytest.skip("this Optax has no galore")
    return contrib.galore(1e-2, rank=4)


def by_optax(tx: Any) -> Any:
    """The recipe of Optax's documentation: put the parameters' specs where parameters were."""
    return optax.tree_map_params(
        tx,
        lambda _, spec: spec,
        tx.init(params()),
        AXES,
        transform_non_params=lambda _: PartitionSpec(),
    )


def by_linen(tx: Any) -> Any:
    """The recipe of Flax's Linen: parameters in boxes, which `init` maps over."""
    boxed: Any = {name: nn.Partitioned(leaf, tuple(AXES[name])) for name, leaf in params().items()}
    return nn.get_partition_spec(jax.eval_shape(tx.init, boxed))


def by_us(tx: Any) -> Any:
    return derive_logical_axes(tx, params(), AXES)


def leaves(tree: Any) -> dict[str, Any]:
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {keystr(path, simple=True, separator="/"): leaf for path, leaf in found}


def misfits(specs: Any, tx: Any) -> set[str]:
    """Paths of the state whose spec is missing, too long, or of dimensions of another size."""
    given = leaves(specs)
    wrong = set()
    for path, leaf in leaves(tx.init(params())).items():
        spec = given.get(path)
        if (
            spec is None
            or len(spec) > leaf.ndim
            or any(name and SIZES[name] != size for name, size in zip(spec, leaf.shape))  # noqa: B905
        ):
            wrong.add(path)
    return wrong


@pytest.mark.parametrize("theirs", [by_optax, by_linen])
def test_for_adam_all_agree(theirs: Callable[[Any], Any]) -> None:
    tx = optax.adam(1e-2)
    assert leaves(theirs(tx)) == leaves(by_us(tx))


@pytest.mark.parametrize(
    ("make", "wrong", "ours"),
    [
        # Rows of a square get specs of full rank, without an error.
        (adafactor, {"0/v_row/square", "0/v_col/kernel"}, {"0/v_row/square": ("heads",)}),
        # Optax raises; Linen has one spec for a list of vectors.
        (lambda: optax.sm3(1e-2), {"0/mu/kernel/0"}, {"0/mu/kernel/1": ("mlp",)}),
        # The dimension of size 24 is called `embed`, the rank `mlp`, and no length tells.
        (
            galore,
            {"0/projector/kernel", "0/base_optimizer_state/mu/kernel"},
            {
                "0/projector/kernel": ("mlp", None),
                "0/base_optimizer_state/mu/kernel": ("embed", None),
            },
        ),
    ],
    ids=["adafactor", "sm3", "galore"],
)
def test_theirs_do_not_fit_and_ours_do(
    make: Callable[[], Any], wrong: set[str], ours: dict[str, Any]
) -> None:
    tx = make()
    for theirs in (by_optax, by_linen):
        if theirs is by_optax and "0/mu/kernel/0" in wrong:
            with pytest.raises(ValueError, match="list"):
                theirs(tx)
        else:
            assert wrong <= misfits(theirs(tx), tx)
    assert misfits(by_us(tx), tx) == set()
    found = leaves(by_us(tx))
    assert {path: tuple(found[path]) for path in ours} == ours


def test_muon_raises_in_optax_and_gets_specs_of_what_is_masked_in_linen() -> None:
    tx = contrib.muon(1e-2)
    with pytest.raises(ValueError, match=r"MaskedNode|named tuple"):
        by_optax(tx)
    extra = leaves(by_linen(tx)).keys() - leaves(tx.init(params())).keys()
    assert "inner_states/adam/inner_state/0/mu/kernel" in extra
    assert misfits(by_us(tx), tx) == set()
    assert leaves(by_us(tx)).keys() == leaves(tx.init(params())).keys()


# Flax renamed it.
OUT_SHARDING = "out_sharding" if Version(flax.__version__) >= Version("0.12.1") else "sharding"


class Model(nnx.Module):
    def __init__(self) -> None:
        metadata: Any = {OUT_SHARDING: ("embed", "mlp")}
        self.kernel = nnx.Param(jnp.ones((16, 24)), **metadata)


def test_an_optimizer_of_nnx_cannot_be_made() -> None:
    mesh = jax.make_mesh((1, 1), ("embed", "mlp"), axis_types=(AxisType.Auto, AxisType.Auto))
    with jax.set_mesh(mesh):
        model = Model()
        assert nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param) is not None
        with pytest.raises(ValueError, match="incompatible with its sharding annotation"):
            nnx.Optimizer(model, adafactor(), wrt=nnx.Param)
