"""The text of compiled programs, as CPU, GPU and TPU print it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from opt_partition._verify.hlo import Array, flat_types, parse, parse_type

GPU = """HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (1, {}, must-alias), \
{1}: (0, {}, may-alias) }, entry_computation_layout={(f32[8]{0})->f32[64]{0}}, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8], y: f32[64]) -> (f32[64], f32[8]) {
  %x = f32[8]{0} parameter(0), metadata={op_name="p[\\'a(b, calls=%add\\']"}
  %y = f32[64]{0} parameter(1)
  %all-gather-start = (f32[8]{0}, f32[64]{0}) all-gather-start(%x), channel_id=1, \
replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true, \
backend_config={"operation_queue_id":"0","collective_backend_config":{"is_sync":false}}
  %reduce-scatter-start = ((f32[64]{0}), f32[8]{0}) reduce-scatter-start(%y), channel_id=2, \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, to_apply=%add
  %all-gather-done = f32[64]{0} all-gather-done(%all-gather-start)
  %reduce-scatter-done = f32[8]{0} reduce-scatter-done(%reduce-scatter-start)
  ROOT %tuple = (f32[64]{0}, /*index=1*/f32[8]{0}) tuple(%all-gather-done, %reduce-scatter-done)
}
"""


def test_asynchronous_collectives() -> None:
    module = parse(GPU)
    entry = module.computations[module.entry]
    assert entry.root == "tuple"
    gather = entry.instructions["all-gather-start"]
    assert gather.type == (Array("f32", (8,)), Array("f32", (64,)))
    assert gather.attribute("replica_groups") == "[1,8]<=[8]"
    assert '"is_sync":false' in (gather.attribute("backend_config") or "")
    assert entry.instructions["reduce-scatter-start"].called("to_apply") == ("add",)
    assert module.num_partitions == 8
    assert module.aliased_parameters == {0, 1}


def test_names_of_arguments_may_hold_anything() -> None:
    [first, second] = parse(GPU).computations["main"].parameters
    assert first.op_name == "p['a(b, calls=%add']"
    assert (second.op_name, second.operands) == ("", ())


@pytest.mark.parametrize(
    ("text", "size", "count"),
    [
        ("f32[64,32]{1,0:T(8,128)S(1)}", 8192, 1),
        ("bf16[5,<=2]{1,0:T(2,128)(2,1)}", 20, 1),
        ("s4[3]{0:E(4)}", 2, 1),
        ("((f32[2]{0}), f32[2]{0:T(128)}, /*index=2*/u32[]{:S(2)})", 20, 3),
        ("token[]", 0, 1),
        ("pred[7]", 7, 1),
    ],
)
def test_types(text: str, size: int, count: int) -> None:
    arrays = list(flat_types(parse_type(text)))
    assert len(arrays) == count
    assert sum(array.bytes for array in arrays) == size


def test_brackets_and_quotes_in_parentheses() -> None:
    text = """HloModule jit_f

ENTRY %main () -> s8[] {
  %text = s8[4]{0} constant("a),\\""), metadata={op_name="a) b"}
  %pair = (s32[], (s8[4]{0}, s8[])) constant((1, ({2}, 3))), sharding={{replicated}, {replicated}}
  ROOT done = s8[] custom-call(%text, s8[4]{0} %pair), custom_call_target="f"
}
"""
    text_, pair, done = parse(text).computations["main"].instructions.values()
    assert (text_.literal, text_.operands, text_.op_name) == ('"a),\\""', (), "a) b")
    assert (pair.literal, pair.attribute("sharding")) == (
        "(1, ({2}, 3))",
        "{{replicated}, {replicated}}",
    )
    assert (done.operands, done.attribute("custom_call_target")) == (("text", "pair"), '"f"')
    assert done.attribute("target") is None


def test_a_real_program() -> None:
    """Everything that this jax prints is read: each operand is an instruction seen before."""

    def step(x: jax.Array, n: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jax.lax.fori_loop(0, n, lambda _, x: jnp.sin(x) @ x, x)
        return jax.lax.cond(n > 2, lambda: y, lambda: -x), jnp.sort(x, axis=0)

    text = jax.jit(step).lower(jnp.ones((4, 4)), 3).compile().as_text()
    assert text is not None
    module = parse(text)
    entry = module.computations[module.entry]
    assert [parameter.op_name for parameter in entry.parameters] == ["x", "n"]
    for computation in module.computations.values():
        seen: set[str] = set()
        for instruction in computation.instructions.values():
            assert seen.issuperset(instruction.operands)
            seen.add(instruction.name)
        assert computation.root in seen


def test_other_text_is_refused() -> None:
    with pytest.raises(ValueError, match="not the text of a compiled XLA program"):
        parse("module @jit_f {}")
