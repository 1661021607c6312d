"""State of fewer than 32 bits that a step decodes as a whole, in the text of compiled programs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from opt_partition._verify.expected import Asked
from opt_partition._verify.hlo import parse
from opt_partition._verify.leaves import Leaf
from opt_partition._verify.wide_copies import wide_copies

ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
W, M = "f32[1024,512]{1,0}", "bf16[1024,512]{1,0}"
# The kernel of XLA for GPUs: new parameter and new momentum of the old ones and the gradient.
KERNEL = f"""HloModule jit_f

%fused (w: {W}, m: {M}, g: {W}) -> ({W}, {M}, {W}) {{
  %w = {W} parameter(0)
  %m = {M} parameter(1)
  %g = {W} parameter(2)
  %wide = {W} convert(%m)
  %new = {W} add(%wide, %g)
  %narrow = {M} convert(%new)
  %sum = {W} add(%w, %new)
  %twice = {W} add(%g, %g)
  ROOT %out = ({W}, {M}, {W}) tuple(%sum, %narrow, %TEMPORARY)
}}

ENTRY %main (w: {W}, m: {M}, g: {W}) -> ({W}, {M}) {{
  %w.1 = {W} parameter(0)
  %m.1 = {M} parameter(1)
  %g.1 = {W} parameter(2)
  %kernel = ({W}, {M}, {W}) fusion(%w.1, %m.1, %g.1), kind=kLoop, calls=%fused
  %param = {W} get-tuple-element(%kernel), index=0
  %state = {M} get-tuple-element(%kernel), index=1
  %more = {W} get-tuple-element(%kernel), index=2
  ROOT %results = ({W}, {M}) tuple(%RESULT, %state)
}}
"""


def leaf(shape: tuple[int, ...] = (1024, 512), dtype: Any = jnp.bfloat16) -> Leaf:
    return Leaf("input", "1/m", "state", ("m",), shape, jnp.dtype(dtype), Asked(), ONE)


def found(text: str) -> list[str | None]:
    return [finding.path for finding in wide_copies(parse(text), [leaf()])]


@pytest.mark.parametrize(
    ("temporary", "result", "copied"),
    [
        ("twice", "param", False),  # made of the gradient
        ("new", "param", True),
        ("new", "more", True),  # now the other one is temporary
        ("twice", "more", True),
    ],
)
def test_a_result_is_not_a_copy(temporary: str, result: str, copied: bool) -> None:
    text = KERNEL.replace("TEMPORARY", temporary).replace("RESULT", result)
    assert found(text) == ["1/m"] * copied


def test_what_is_sent_is_not_a_copy() -> None:
    text = KERNEL.replace("TEMPORARY", "twice").replace("RESULT", "all")
    sent = "  %all = f32[8192,512]{1,0} all-gather(%param), replica_groups={}, dimensions={0}\n"
    assert found(text.replace("  ROOT %results", sent + "  ROOT %results")) == []


ASYNCHRONOUS = f"""HloModule jit_f

%slice (m: {M}, n: s32[]) -> bf16[8,512] {{
  %m = {M} parameter(0)
  %n = s32[] parameter(1)
  ROOT %part = bf16[8,512]{{1,0}} dynamic-slice(%m, %n, %n), dynamic_slice_sizes={{8,512}}
}}

ENTRY %main (w: {W}, m: {M}, n: s32[]) -> bf16[8,512] {{
  %w = {W} parameter(0)
  %m.1 = {M} parameter(1)
  %n.1 = s32[] parameter(2)
  %start = (({M}, s32[], {W}), bf16[8,512]{{1,0}}, u32[]) fusion-start(%m.1, %n.1, %w), calls=%slice
  ROOT %done = bf16[8,512]{{1,0}} fusion-done(%start)
}}
"""


def test_an_asynchronous_kernel_makes_what_it_returns() -> None:
    """The type of its start has its operands, too."""
    assert found(ASYNCHRONOUS) == []


def in_pieces(m: jax.Array, w: jax.Array) -> Any:
    def one(n: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        m, w = carry
        part = jax.lax.dynamic_slice_in_dim(m, n * 64, 64).astype(jnp.float32)
        new = part - jnp.sum(part)
        old = jax.lax.dynamic_slice_in_dim(w, n * 64, 64)
        w = jax.lax.dynamic_update_slice_in_dim(w, old - new, n * 64, 0)
        return jax.lax.dynamic_update_slice_in_dim(m, new.astype(m.dtype), n * 64, 0), w

    return jax.lax.fori_loop(0, 16, one, (m, w))


def as_a_whole(m: jax.Array, w: jax.Array) -> Any:
    wide = jax.lax.optimization_barrier(m.astype(jnp.float32))
    new = wide - jnp.sum(wide)
    return new.astype(m.dtype), w - new


@pytest.mark.parametrize(("step", "copied"), [(in_pieces, False), (as_a_whole, True)])
def test_compiled_steps(step: Any, copied: bool) -> None:
    shapes = [jax.ShapeDtypeStruct((1024, 512), dtype) for dtype in (jnp.bfloat16, jnp.float32)]
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*shapes).compile()
    assert found(compiled.as_text() or "") == ["1/m"] * copied
