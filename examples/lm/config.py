"""The command line: every flag is a field of `Config`, validated before anything is written."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Never

from lm.sizes import VOCAB, ModelConfig

INT32_MAX = 2**31 - 1
WEIGHTS = ("stochastic", "remainder", "kahan")
# smaller values may be flushed to zero
FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, (2 - 2**-23) * 2.0**127


class UsageError(Exception):
    """An error the user can fix; reported as one line on stderr with exit code 2."""


def flag(default: Any, text: str, **options: Any) -> Any:
    """Returns a dataclass field that is also a command-line flag."""
    return dataclasses.field(default=default, metadata={"help": text, **options})


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings that determine what a run computes; saved as `config.json`."""

    data: tuple[str, ...] = flag(
        (),
        "files or directories to learn from (default: Python's own library)",
        nargs="+",
        metavar="PATH",
    )
    steps: int = flag(1200, "updates to make")
    seed: int = flag(0, "decides initial parameters, batches and the sample")
    batch_size: int = flag(16, "sequences per step")
    microbatches: int = flag(
        1,
        "parts of a batch, differentiated one after the other: less memory, the same update; "
        "their number times data of --mesh must divide --batch-size",
    )
    sequence_length: int = flag(128, "bytes per sequence")
    layers: int = flag(3, "blocks of the transformer")
    d_model: int = flag(128, "width of the transformer")
    heads: int = flag(4, "attention heads per block")
    optimizer: str = flag(
        "muon",
        "of the matrices; the byte table, the head and vectors have their own",
        choices=("adamw", "muon", "muonh"),
    )
    learning_rate: float = flag(
        4e-3,
        "peak of the schedule; with --resume: the rate itself, until the program ends",
    )
    weight_decay: float = flag(0.1, "decoupled weight decay")
    clip: float = flag(1.0, "largest global norm of a gradient")
    mesh: str = flag(
        "",
        "devices over which batch and parameters are split, such as data=4,model=2 (default: all "
        "that there are and that can be used; 8 virtual ones where there is only a CPU)",
        metavar="data=D,model=M",
    )
    zero: bool = flag(
        True,
        "split optimizer state over data, too, not only parameters' dimensions over model (ZeRO-1)",
        action=argparse.BooleanOptionalAction,
    )
    skip_nonfinite: bool = flag(
        False,
        "drop each device's part of a microbatch whose loss or gradients are not finite; update "
        "from the rest, or not at all where nothing is left. How many sequences were dropped is "
        "shown and logged (without, the run stops)",
        action=argparse.BooleanOptionalAction,
    )
    average: float = flag(
        0.0,
        "decay of an average of the parameters, such as 0.999, which is what is evaluated and "
        "samples from; 0 for none",
    )
    guard: bool = flag(
        False,
        "skip steps whose loss, gradient or update is not finite, or far above those of the last "
        "128; after 20 in a row go back to the last good state, which is kept on the host",
        action=argparse.BooleanOptionalAction,
    )
    weights: str = flag(
        "float32",
        "how parameters are stored; in bfloat16 they take small updates by stochastic rounding, or "
        "by 16 more bits, of a float32 (remainder) or of what was lost (kahan)",
        choices=("float32", "bfloat16", *(f"bfloat16-{how}" for how in WEIGHTS)),
    )
    state: str = flag("float32", "how moments are stored", choices=("float32", "bfloat16", "8bit"))
    checkpoint_every: int = flag(200, "steps between checkpoints")
    prompt: str = flag("def ", "what the sample begins with")
    sample_bytes: int = flag(400, "length of the sample")

    @property
    def model(self) -> ModelConfig:
        """The sizes of the model."""
        return ModelConfig(self.layers, self.d_model, self.heads, d_ff=4 * self.d_model)

    @property
    def mesh_shape(self) -> tuple[int, int]:
        """The number of devices along `data` and along `model`, once `mesh` is set."""
        (data, data_size), (model, model_size) = sorted(
            part.split("=", 1) for part in self.mesh.split(",")
        )
        if (data, model) != ("data", "model") or not (data_size + model_size).isdecimal():
            raise ValueError
        return int(data_size), int(model_size)

    def check(self) -> Config:
        """Returns the configuration itself.

        Raises:
          UsageError: it makes no sense; says which flag, and why.
        """
        self._check_ranges()
        if self.average >= 1:
            raise UsageError(f"--average must be less than 1; got {self.average}")
        if self.d_model % (2 * self.heads):
            raise UsageError(
                f"--d-model {self.d_model} must be a multiple of twice --heads {self.heads}"
            )
        if self.batch_size % self.microbatches:
            raise UsageError(
                f"--microbatches {self.microbatches} does not divide --batch-size {self.batch_size}"
            )
        if self.mesh:
            self._check_mesh()
        return self

    def _check_mesh(self) -> None:
        try:
            data, model = self.mesh_shape
        except ValueError:
            raise UsageError(f"--mesh must look like data=4,model=2; got {self.mesh!r}") from None
        if data < 1 or model < 1:
            raise UsageError(f"--mesh must have at least one device per axis; got {self.mesh}")
        if self.batch_size % data:
            raise UsageError(
                f"--mesh {self.mesh} does not divide: data={data} must divide "
                f"--batch-size {self.batch_size}"
            )
        if self.batch_size % (data * self.microbatches):
            raise UsageError(
                f"--microbatches {self.microbatches} does not divide: {self.microbatches} x "
                f"data={data} of --mesh must divide --batch-size {self.batch_size}. "
                f"Take a --batch-size of {data * self.microbatches}, or a multiple of it"
            )
        for what, size in ("--heads", self.heads), ("the bytes' range", VOCAB):
            if size % model:
                raise UsageError(
                    f"--mesh {self.mesh} does not divide: model={model} must divide {what} {size}"
                )

    def _check_ranges(self) -> None:
        least = {"seed": 0, "weight_decay": 0, "average": 0, "sample_bytes": 0}
        most = {"seed": 2**32 - 1, "sample_bytes": 1_000_000}
        for field in dataclasses.fields(self):
            value, low = getattr(self, field.name), least.get(field.name, 1)
            if type(value) is int:
                _check_range(field.name, value, low, most.get(field.name, INT32_MAX))
            if isinstance(value, float):
                is_zero = value == 0 and field.name in least
                if not (is_zero or FLOAT32_MIN <= value <= FLOAT32_MAX):
                    raise UsageError(
                        f"{_dashed(field.name)} must be a positive number, from {FLOAT32_MIN:.2g} "
                        f"to {FLOAT32_MAX:.2g} as float32 holds it; got {value}"
                    )


# Flags that may differ when a run is resumed. The mesh, ZeRO and microbatches change losses only
# by rounding; a learning rate overrides the schedule at run time without replacing it.
MAY_CHANGE = (
    *("learning_rate", "mesh", "zero", "microbatches", "skip_nonfinite", "guard"),
    *("checkpoint_every", "prompt", "sample_bytes"),
)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The participating processes, each started with the same flags."""

    processes: int = flag(1, "processes that share the mesh; start each with the same flags")
    process_id: int | None = flag(None, "which of them this one is, from 0", type=int)
    coordinator: str | None = flag(
        None,
        "host:port of process 0; without it and --process-id, JAX asks JAX_COORDINATOR_ADDRESS "
        "and the cluster's scheduler",
        type=str,
        metavar="HOST:PORT",
    )
    heartbeat_timeout: int = flag(
        100, "seconds of silence after which a process counts as dead, and the others end"
    )

    def check(self) -> Cluster:
        """Returns the same.

        Raises:
          UsageError: it makes no sense; says which flag, and why.
        """
        _check_range("processes", self.processes, 1, INT32_MAX)
        _check_range("heartbeat_timeout", self.heartbeat_timeout, 1, INT32_MAX)
        if self.process_id is not None and not 0 <= self.process_id < self.processes:
            raise UsageError(
                f"--process-id must be from 0 to {self.processes - 1}, less than --processes; "
                f"got {self.process_id}"
            )
        if self.coordinator is not None:
            _, _, port = self.coordinator.rpartition(":")
            if not re.fullmatch(r"\S+:[0-9]{1,5}", self.coordinator) or not 0 < int(port) < 2**16:
                raise UsageError(
                    "--coordinator must be a host and a port, such as localhost:1234; got "
                    f"{self.coordinator!r}"
                )
        return self


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A parsed command line.

    Attributes:
      given: the fields of `Config` that were named.
      out: folder for a new run.
      resume: folder of the run to continue.
      cluster: who trains.
    """

    given: Mapping[str, Any]
    out: Path | None
    resume: Path | None
    cluster: Cluster = Cluster()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Never:
        raise UsageError(message)


def parse_arguments(argv: Sequence[str] | None) -> Arguments:
    """Reads the command line.

    Args:
      argv: what follows the program's name; `None` for that of the process.

    Raises:
      UsageError: unknown flags, values of the wrong type, or flags that contradict one another.
    """
    parser = _Parser(
        description="Trains a byte-level language model on the devices that there are.",
        allow_abbrev=False,
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--out", type=Path, help="folder of the run (default: runs/<time>)")
    where.add_argument("--resume", type=Path, metavar="RUN", help="folder of a run to continue")
    together = parser.add_argument_group("several processes")
    for to, kind in (parser, Config), (together, Cluster):
        for field in dataclasses.fields(kind):
            to.add_argument(_dashed(field.name), default=argparse.SUPPRESS, **_options(field))
    given = vars(parser.parse_args(argv))
    out, resume = given.pop("out"), given.pop("resume")
    names = {field.name for field in dataclasses.fields(Cluster)} & given.keys()
    cluster = Cluster(**{name: given.pop(name) for name in names}).check()
    if cluster.processes > 1 and out is resume:
        raise UsageError("--processes needs --out: all of them must know the folder")
    if "data" in given:
        given["data"] = tuple(map(os.path.abspath, given["data"]))
    if resume is None:
        Config(**given).check()
    return Arguments(given, out, resume, cluster)


def _options(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """Returns the argparse options of a field."""
    options = dict(field.metadata)
    if field.default not in ((), "", None):
        options["help"] += f" (default: {field.default})"
    if not options.keys() & {"action", "nargs", "type"}:
        options["type"] = type(field.default)
    return options


def continue_config(saved: Mapping[str, Any], given: Mapping[str, Any], run: Path) -> Config:
    """Returns the configuration of a resumed run, including its own learning rate.

    Args:
      saved: what `config.json` says.
      given: the flags of the command line.
      run: the folder, for messages.

    Raises:
      UsageError: a flag contradicts the run, or the file is not that of a run.
    """
    types = {f.name: type(f.default) for f in dataclasses.fields(Config)} | {"data": list}
    if not all(isinstance(saved.get(name), kind) for name, kind in types.items()):
        raise UsageError(f"{run}/config.json is not the configuration of a run of this program")
    config = Config(**{name: saved[name] for name in types} | {"data": tuple(saved["data"])})
    wanted = dataclasses.replace(config, **given).check()
    for name in given:
        if name not in MAY_CHANGE and given[name] != getattr(config, name):
            raise UsageError(
                f"{run} is a run of another configuration: {_dashed(name)} is "
                f"{getattr(config, name)} there, not {given[name]}"
            )
    return dataclasses.replace(wanted, learning_rate=config.learning_rate)


def repeated_flags(given: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Returns the flags to repeat when the run is resumed again.

    Args:
      given: the flags of a continuation.
      saved: what `config.json` says; flags that say the same need not be repeated. A learning rate
        must be: there, it is the peak of the schedule.
    """
    flags = []
    for name, value in given.items():
        if name != "learning_rate" and saved.get(name) == value:
            continue
        if isinstance(value, bool):
            flags.append(_dashed(name if value else f"no_{name}"))
        else:
            flags.append(f"{_dashed(name)}={value}")
    return flags


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if value < low:
        raise UsageError(f"{_dashed(name)} must be at least {low}; got {value}")
    if value > high:
        raise UsageError(f"{_dashed(name)} must be at most {high}; got {value}")


def _dashed(name: str) -> str:
    """A field as a flag.

    Examples:
      >>> _dashed("batch_size")
      '--batch-size'
    """
    return "--" + name.replace("_", "-")
