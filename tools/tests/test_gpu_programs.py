"""What is read from programs for a GPU, and the figures of the compiler where it is installed."""

import os
import subprocess
import sys
from pathlib import Path

import _gpu_target
import gpu_programs
import pytest
from _kernels import conversions, kernels, whole_copies

BENCH = Path(_gpu_target.__file__).parent

TEXT = """HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%fused (p: f32[4,8], g: bf16[4,8], m: f32[32], n: f32[]) -> (f32[4,8], f32[32]) {
  %p = f32[4,8]{1,0} parameter(0)
  %g = bf16[4,8]{1,0} parameter(1)
  %m = f32[32]{0} parameter(2)
  %n = f32[] parameter(3)
  %narrow = bf16[4,8]{1,0} convert(%p)
  %wide = f32[4,8]{1,0} convert(%g)
  %sum = f32[4,8]{1,0} add(%p, %wide)
  ROOT %both = (f32[4,8]{1,0}, f32[32]{0}) tuple(%sum, %m)
}

%count (n: s32[]) -> f32[] {
  %n.1 = s32[] parameter(0)
  ROOT %real = f32[] convert(%n.1)
}

ENTRY %main (p: f32[4,8], g: bf16[4,8], n: s32[]) -> (f32[4,8], f32[32], f32[4,8]) {
  %p.1 = f32[4,8]{1,0} parameter(0), metadata={op_name="params[\\'w\\']"}
  %g.1 = bf16[4,8]{1,0} parameter(1)
  %n.2 = s32[] parameter(2)
  %flat = f32[32]{0} bitcast(%p.1)
  %scalar = f32[] fusion(%n.2), kind=kLoop, calls=%count
  %new = (f32[4,8]{1,0}, f32[32]{0}) fusion(%p.1, %g.1, %flat, /*index=3*/%scalar), kind=kLoop, \
calls=%fused
  %first = f32[4,8]{1,0} get-tuple-element(%new), index=0
  %second = f32[32]{0} get-tuple-element(%new), index=1
  %start = (f32[4,8]{1,0:S(5)}, f32[4,8]{1,0}, u32[]) copy-start(%first)
  %done = f32[4,8]{1,0:S(5)} copy-done(%start)
  ROOT %results = (f32[4,8]{1,0}, f32[32]{0}, /*index=2*/f32[4,8]{1,0:S(5)}) \
tuple(%first, %second, %done)
}
"""


def test_kernels_read_and_write_each_array_once() -> None:
    scalar, new, copy = kernels(TEXT)
    assert (scalar.name, scalar.read, scalar.written, scalar.elements) == ("scalar", 4, 4, 1)
    # `%flat` is `%p.1` under another name, `%n` is not used.
    assert (new.name, new.read, new.written) == ("new", 32 * 4 + 32 * 2, 2 * 32 * 4)
    assert (new.bytes, new.elements) == (new.read + new.written, 32)
    assert (copy.name, copy.read, copy.written) == ("start", 32 * 4, 32 * 4)


BODY = """
%piece (whole: f32[4,8], at: s32[], new: f32[1,8]) -> f32[4,8] {
  %whole = f32[4,8]{1,0} parameter(0)
  %at = s32[] parameter(1)
  %old = f32[1,8]{1,0} dynamic-slice(%whole, %at, %at), dynamic_slice_sizes={1,8}
  %new.1 = f32[1,8]{1,0} parameter(2)
  %more = f32[1,8]{1,0} add(%old, %new.1)
  ROOT %put = f32[4,8]{1,0} dynamic-update-slice(%whole, %more, %at, %at)
}

%body (carry: (s32[], f32[4,8], f32[1,8])) -> (s32[], f32[4,8], f32[1,8]) {
  %carry = (s32[], f32[4,8]{1,0}, f32[1,8]{1,0}) parameter(0)
  %index = s32[] get-tuple-element(%carry), index=0
  %array = f32[4,8]{1,0} get-tuple-element(%carry), index=1
  %row = f32[1,8]{1,0} get-tuple-element(%carry), index=2
  %next = f32[4,8]{1,0} fusion(%array, %index, %row), kind=kLoop, calls=%piece
  ROOT %carried = (s32[], f32[4,8]{1,0}, f32[1,8]{1,0}) tuple(%index, %next, %row)
}

ENTRY"""


def test_the_kernels_of_loops_count_as_often_as_these_run() -> None:
    loop = "while(%first), condition=%c, body=%body"
    text = TEXT.replace("ENTRY", BODY.lstrip()).replace("copy-start(%first)", loop)
    known = text.replace(loop, f'{loop}, backend_config={{"known_trip_count":{{"n":"4"}}}}')
    *_, piece = kernels(known)
    # A row of the array, the new row and the index; and the row that is replaced.
    assert (piece.name, piece.read, piece.written, piece.times) == ("next", 32 + 32 + 4, 32, 4)
    assert piece.bytes == 4 * 100
    assert [kernel.name for kernel in kernels(text, loops=False)] == ["scalar", "new"]
    with pytest.raises(ValueError, match="the kernels of a `conditional` are not counted"):
        kernels(text.replace("while(", "conditional("))


def test_copies_of_whole_leaves() -> None:
    assert whole_copies(TEXT, 32) == ["start"]
    assert whole_copies(TEXT, 33) == []
    assert whole_copies(TEXT.replace("add(%p, %wide)", "copy(%p)"), 32) == ["sum", "start"]


def test_conversions_inside_of_kernels() -> None:
    assert conversions(TEXT, "f32", "bf16") == ["narrow"]
    assert conversions(TEXT, "bf16", "f32") == ["wide"]
    assert conversions(TEXT, "s32", "f32") == ["real"]


def test_without_the_compiler_the_only_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gpu_target, "version", lambda: None)
    [row] = gpu_programs.measure(True)
    assert (row.figure, row.ours) == ("compilers missing", 1)
    assert "`hatch run gpu-programs:bench --only gpu_programs`" in row.note


@pytest.mark.skipif(
    _gpu_target.version() is None,
    reason="needs XLA's compiler for GPUs: hatch run gpu-programs:unit tools/tests",
)
def test_the_figures_of_an_h100() -> None:
    # The tests' flags are for quick machine code.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, str(BENCH), "--only", "gpu_programs", "--quick"]
    done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    assert done.stdout.count(" ok") > 40
