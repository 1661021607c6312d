"""Stores what other compilers make of the programs of `verify_programs.py`.

    hatch run gpu-programs:python tests-integration/verify_texts.py gpu   # no GPU is needed
    python tests-integration/verify_texts.py tpu   # pip install 'jax[tpu]'; no TPU is needed
    python tests-integration/verify_texts.py cpu   # another version of jax than the tests run with

A pattern as a second argument, e.g. `average.*`, adds the programs of these names alone.
"""

from __future__ import annotations

import importlib.metadata
import json
import lzma
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

FOLDER = Path(__file__).parent / "verify_texts"
TOPOLOGY = "v5e:2x4"
GPU_TARGET = FOLDER.parents[1] / "tools/bench/_gpu_target.py"


def load(path: Path) -> dict[str, Any]:
    """Versions and programs of a file: `{'jax': …, 'compiler': …, 'programs': {name: …}}`."""
    data: dict[str, Any] = json.loads(lzma.decompress(path.read_bytes()))
    return data


def packed_leaf(leaf: Any, found: Any) -> list[Any]:
    """A leaf with its sharding as JSON."""
    mesh = list(found.mesh.shape.items()) if found is not None else None
    spec = list(found.spec) if found is not None else None
    name, shape = list(leaf.name), list(leaf.shape)
    return [leaf.side, leaf.path, leaf.role, name, shape, str(leaf.dtype), mesh, spec, leaf.donated]


def unpacked_leaf(packed: list[Any]) -> Any:
    """The leaf that JSON holds; its mesh is abstract, and nothing was asked of it."""
    from opt_partition._leaves import leaf_report

    side, path, role, name, shape, dtype, mesh, spec, donated = packed
    found = None
    if mesh is not None:
        names, sizes = zip(*mesh, strict=True)
        entries = [tuple(axis) if isinstance(axis, list) else axis for axis in spec]
        found = NamedSharding(AbstractMesh(tuple(map(int, sizes)), names), PartitionSpec(*entries))
    struct = jax.ShapeDtypeStruct(shape, dtype)
    return leaf_report(side, path, role, tuple(name), struct, found, donated=donated)


def stripped(text: str) -> str:
    """A compiled program without metadata, layouts, comments and the backend's settings."""
    noted = ("known_trip_count", "async_collective_fusion_config")
    text = re.sub(r"/\*.*?\*/", "", text[text.index("HloModule") :])
    text = re.sub(r"^(File|Function|Stack)\w+\n(\d.*\n)*\n?", "", text, flags=re.MULTILINE)
    lines = []
    for line in text.splitlines():
        kept = {key: _pair(line, f'"{key}":') for key in noted}
        for key in ("metadata", "backend_config", "frontend_attributes", "sharding"):
            while pair := _pair(line, f", {key}="):
                line = line.replace(pair, "")
        if config := ",".join(pair for pair in kept.values() if pair):
            line += f", backend_config={{{config}}}"
        if not line.startswith("HloModule"):
            line = re.sub(r"(\[[\d,]*\])\{[^{}]*\}", r"\1", line)
        else:
            line = line.replace(_pair(line, ", entry_computation_layout="), "")
        lines.append(line)
    body = "\n".join(lines)
    return body[: body.rindex("\n}") + 3]


def _pair(line: str, start: str) -> str:
    """`start` and the brackets that follow it, in quotes or not; nothing where it is not."""
    at = line.find(start)
    if at < 0 or line[at + len(start)] != "{":
        return ""
    depth, quoted = 0, False
    for end in range(at + len(start), len(line)):
        quoted ^= line[end] == '"' and line[end - 1] != "\\"
        if not quoted:
            depth += (line[end] == "{") - (line[end] == "}")
            if depth == 0:
                return line[at : end + 1]
    raise ValueError(f"never closed: {line[at : at + 80]}")


def devices(platform: str) -> list[Any]:
    if platform == "cpu":
        return jax.devices()
    if platform == "gpu":
        return list(runpy.run_path(str(GPU_TARGET))["devices"](8))
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(TOPOLOGY, platform="tpu").devices)


def compiler(platform: str) -> str:
    name = {"cpu": "jaxlib", "gpu": "jax-cuda12-pjrt", "tpu": "libtpu"}[platform]
    return f"{name} {importlib.metadata.version(name)}"


def made(platform: str, only: str) -> Iterator[tuple[str, list[Any]]]:
    from opt_partition import _leaves as leaves
    from opt_partition._hlo import parse_program
    from verify_programs import FAULTY, HEALTHY, WASTEFUL, is_undone
    from verify_steps import Meshes

    meshes = Meshes(devices(platform))
    for program in (*FAULTY, *WASTEFUL, *HEALTHY):
        judged = not program.finds or {kind for kind, _ in program.finds} == {"state gather"}
        undone = is_undone(program.name, platform)
        if not judged or undone or not re.search(only, program.name):
            continue
        step = program.build(meshes)
        compiled = step.lower().compile()
        printed = compiled.as_text() or ""
        module = parse_program(printed)
        inputs = leaves.input_leaves(compiled, step.expected, module)
        traced = leaves.trace_step(module, inputs)
        outputs = leaves.output_leaves(compiled, step.expected, inputs, traced)
        text = stripped(printed)
        print(f"{program.name}: {len(text):,}", file=sys.stderr)
        trees: Any = (compiled.in_tree, compiled.out_tree)
        shardings = (compiled.input_shardings, compiled.output_shardings)
        packed = [
            list(map(packed_leaf, side, tree.flatten_up_to(found)))
            for side, tree, found in zip((inputs, outputs), trees, shardings, strict=True)
        ]
        yield program.name, [text, *packed]


def main(platform: str, only: str = "") -> None:
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", 8)
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{platform}-jax{jax.__version__}.json.xz"
    before: dict[str, Any] = {"compiler": "", "programs": {}}
    if only and path.exists():
        before = load(path)
    compilers = dict.fromkeys([*filter(None, before["compiler"].split(", ")), compiler(platform)])
    data = {
        "jax": jax.__version__,
        "compiler": ", ".join(compilers),
        "platform": platform,
        "programs": before["programs"] | dict(made(platform, only)),
    }
    path.write_bytes(lzma.compress(json.dumps(data).encode(), preset=9))
    print(f"{path}: {len(data['programs'])} programs, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
