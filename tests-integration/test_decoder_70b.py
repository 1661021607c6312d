"""The 70B decoder of the examples: its plans, and the guide that shows them."""

import functools
import importlib.util
import itertools
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import chex
import jax
import pytest
from opt_partition import MemoryPlan, memory_plan
from opt_partition.__main__ import read_rules
from opt_partition._display import byte_cells, human_bytes

ROOT = pathlib.Path(__file__).parents[1]
JOBS = ("adamw", "adafactor", "lion")
GUIDE = ROOT / "docs" / "memory-plan.md"
MESH = jax.sharding.AbstractMesh((64, 8, 8), ("data", "fsdp", "model"))
LEVELS: dict[str, dict[str, Any]] = {
    "none": {},
    "ZeRO-1": {"zero": "data"},
    "ZeRO-2": {"zero": "data", "zero_level": 2},
}


@pytest.fixture(scope="module")
def decoder_70b() -> Any:
    path = ROOT / "examples" / "decoder_70b.py"
    spec = importlib.util.spec_from_file_location("decoder_70b", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@functools.cache
def planned(decoder_70b: Any, name: str, level: str = "ZeRO-1") -> MemoryPlan:
    tx, params, axes = getattr(decoder_70b, name)()
    return memory_plan(tx, params, axes, decoder_70b.RULES, MESH, **LEVELS[level])


def test_the_decoder_has_the_published_number_of_parameters(decoder_70b: Any) -> None:
    def count(**kwargs: Any) -> int:
        params, axes = decoder_70b.decoder(**kwargs)
        chex.assert_trees_all_equal_structs(params, axes)
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    assert count() == count(stacked=True) == 70_553_706_496
    assert count(config=decoder_70b.LLAMA_2_70B) == 68_976_648_192


def test_its_rules_are_the_same_in_both_files(decoder_70b: Any) -> None:
    assert read_rules(str(ROOT / "examples" / "decoder_70b.toml")) == [*decoder_70b.RULES]


@pytest.mark.slow
def test_the_guide_shows_what_the_code_computes(decoder_70b: Any) -> None:
    """`UPDATE_DOCS=1` rewrites the guide."""
    text = GUIDE.read_text()
    sections = {"summary": _summary(decoder_70b), "fields": _fields(decoder_70b)}
    for name, content in sections.items():
        head, found, rest = text.partition(f"<!-- {name} -->\n")
        assert found
        _, found, rest = rest.partition("\n<!-- end -->")
        assert found
        text = f"{head}<!-- {name} -->\n{content}\n<!-- end -->{rest}"
    if os.environ.get("UPDATE_DOCS"):
        GUIDE.write_text(text)
    assert GUIDE.read_text() == text


def _summary(decoder_70b: Any) -> str:
    head = ["optimizer", "ZeRO", "parameters", "gradients", "optimizer state", "total", "bytes"]
    rows = [
        [
            f"`{name}`",
            level,
            human_bytes(plan.params.bytes_per_device),
            human_bytes(plan.grads.bytes_per_device),
            human_bytes(plan.state.bytes_per_device),
            *byte_cells(plan.total_bytes_per_device),
        ]
        for name, level in itertools.product(JOBS, LEVELS)
        for plan in [planned(decoder_70b, name, level)]
    ]
    return _markdown(head, rows)


def _fields(decoder_70b: Any) -> str:
    head = ["optimizer", "field", "unsharded", "per device", "with ZeRO"]
    rows = []
    for name in JOBS:
        before, after = planned(decoder_70b, name, "none"), planned(decoder_70b, name)
        for field, size in before.state_fields.items():
            unsharded = sum(row.leaf.bytes for row in before.rows if row.field == field)
            sizes = (unsharded, size, after.state_fields[field])
            rows.append([f"`{name}`", f"`{field}`", *map(human_bytes, sizes)])
    return _markdown(head, rows)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    left = sum(cell.startswith("`") or cell in LEVELS for cell in rows[0])
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *rows])
