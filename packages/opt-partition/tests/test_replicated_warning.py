"""ZeRO that leaves state replicated says so once, or is an error."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import optax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec
from opt_partition import extend_over, memory_plan
from opt_partition.errors import AxesError, IndivisibleError, ReplicatedWarning

RULES = [("embed", None), ("mlp", None)]
MESH = AbstractMesh((8, 2), ("data", "model"))
ONE = AbstractMesh((1, 8), ("data", "model"))
EVEN, ODD = (64, 16), (63, 15)


def plan(*shapes: tuple[int, ...], mesh: AbstractMesh = MESH, **more: Any) -> Any:
    params = {str(n): jax.ShapeDtypeStruct(shape, "float32") for n, shape in enumerate(shapes)}
    axes = {name: ("embed", "mlp")[: leaf.ndim] for name, leaf in params.items()}
    options: dict[str, Any] = {"zero": "data", **more}
    return memory_plan(optax.adam(1e-3), params, axes, RULES, mesh, **options)


def said(function: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    assert {warning.category for warning in caught} <= {ReplicatedWarning}
    assert {warning.filename for warning in caught} <= {__file__}, "where the caller is"
    return [str(warning.message) for warning in caught]


def test_dimensions_that_do_not_divide() -> None:
    [message] = said(lambda: plan(EVEN, ODD))
    held = 4 * 63 * 15
    waste = 2 * (held - -(-held // 8))
    assert message == (
        f"ZeRO over data=8 leaves 2 of 5 leaves replicated, {waste / 1024:.2f} KiB per device "
        "beyond an equal share, as no dimension of their shards is divisible: 0/mu/1 (63, 15), "
        "0/nu/1 (63, 15); pad these dimensions or name other mesh axes"
    )
    with pytest.raises(IndivisibleError, match=r"0/mu/1 \(63, 15\)"):
        plan(EVEN, ODD, strict=True)


def test_an_axis_of_one_device() -> None:
    [message] = said(lambda: plan(EVEN, mesh=ONE))
    assert message == (
        "ZeRO over data=1 has no effect: 8.00 KiB stay on each device; name mesh axes with more "
        "than one device"
    )
    with pytest.raises(AxesError, match="ZeRO over data=1 has no effect"):
        plan(EVEN, mesh=ONE, strict=True)


@pytest.mark.parametrize(
    "quiet",
    [
        lambda: plan(EVEN),
        lambda: plan(ODD, zero=None),
        lambda: plan(EVEN, (7,)),  # less than an element for each device
        lambda: plan((1024, 16), (63,)),  # 0.4 % of the bytes
        lambda: plan(EVEN, ODD, zero_min_bytes=4 * 63 * 15 + 1),
        lambda: plan(),
    ],
)
def test_what_is_not_worth_a_warning(quiet: Callable[[], Any]) -> None:
    assert said(quiet) == []


def test_once_for_all_that_zero_applies_to() -> None:
    [message] = said(lambda: plan(ODD, zero_level=2, accumulate="float32"))
    assert "leaves 4 of 5 leaves replicated" in message


def test_extend_over_by_itself() -> None:
    specs, shapes = {"w": PartitionSpec()}, {"w": jax.ShapeDtypeStruct(ODD, "float32")}
    [message] = said(lambda: extend_over(specs, shapes, MESH, "data"))
    assert message.startswith("ZeRO over data=8 leaves 1 of 1 leaves replicated, 3.23 KiB")
    with pytest.raises(IndivisibleError, match=r"w \(63, 15\)"):
        extend_over(specs, shapes, MESH, "data", strict=True)
