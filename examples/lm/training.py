"""Training, step by step: the program that `train_lm.py` starts.

What to look at: parameters are updated in groups, each by an optimizer of its own (`make_groups`),
whose state is sharded as the parameters are, or further, and what that takes is known before
(`place`); with a learning rate that may change at run time (`train_step`), from gradients of a
batch that need not fit into memory at once (`loss_and_gradients`), by a program that is compiled
once and checked before it runs (`compile_step`, `check_step`). All of it is saved while training
goes on, with where it is in the data (`train`), and restored by name on whatever mesh and by
however many processes (`restore`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import shlex
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import opt_precision
import optax
from jax.sharding import NamedSharding, PartitionSpec
from opt_accumulate import (
    GuardState,
    ParamsTransformation,
    Reason,
    Spike,
    accumulate_gradients,
    guard,
    report,
    rollback,
    with_average,
)
from opt_adafactor import Adafactor, adafactor
from opt_checkpoint import Checkpointer, Plan, SavedStep, plan_restore
from opt_checkpoint.errors import CheckpointError, PlanError
from opt_core import (
    MultiOptimizer,
    Optimizer,
    OptimizerDef,
    OptimizerState,
    clip_metrics,
    describe,
    group_metrics,
    increment_step,
)
from opt_matrix import Matrices, MatrixPlan, hyperball, muon, plan_matrices, scale_by_muon
from opt_optax_bridge import resolve_hyper_params
from opt_partition import Layout, extend_over, logical_to_mesh

from lm.config import Arguments, Config, UsageError, continue_config, repeated_flags
from lm.data import Batches
from lm.job import Job, make_job
from lm.memory import check_memory
from lm.model import AXIS_RULES, next_byte_loss
from lm.placement import Placement, check_step, describe_plan, describe_report, place
from lm.processes import first_of_all, is_first, say, stop_requests, together
from lm.progress import Progress, announced, folded
from lm.report import SHORT, evaluator, write_report
from lm.run_folder import RunFolder, numbers

KEPT = 3  # checkpoints: the latest ones
MOST_SKIPPED = 20  # whole batches in a row: what is left is not going to be finite again
GOOD_EVERY = 10  # steps between the good states that `--guard` keeps on the host
GOOD_KEPT = 2


def make_schedule(config: Config) -> optax.Schedule:
    """Warms up over a twentieth of the run, then decays to a tenth of the peak."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.steps // 20,
        decay_steps=config.steps,
        end_value=0.1 * config.learning_rate,
    )


def stored(config: Config, tx: Any) -> Any:
    """Returns a transformation whose state, and the parameters, are as `--state`, `--weights`."""
    codecs = {"8bit": opt_precision.dynamic8, "bfloat16": opt_precision.bfloat16}
    if (config.weights, config.state) == ("float32", "float32"):
        return tx
    tx = opt_precision.quantize_state(tx, codecs.get(config.state, opt_precision.identity)())
    _, _, how = config.weights.partition("-")
    if how == "stochastic":
        return opt_precision.stochastic_weights(tx, seed=config.seed)
    return opt_precision.master_weights(tx, storage=how) if how else tx  # type: ignore[arg-type]


def wrapped(config: Config, constructor: Callable[..., Any]) -> Callable[..., OptimizerDef]:
    """Returns a constructor of definitions that store and average as the flags say.

    Hyper-parameters are those of `constructor`, also at run time.
    """

    @functools.wraps(constructor)
    def make(*args: Any, **kwargs: Any) -> Any:
        tx = stored(config, constructor(*args, **kwargs))
        return with_average(tx, config.average, warmup=True) if config.average else tx

    made: Callable[..., OptimizerDef] = opt.wrap_optax_optimizer(make)
    return made


def lay_out_parameters(job: Job) -> tuple[Any, Any, Layout]:
    """Returns the names of the parameters' dimensions, their shapes, and their shardings."""
    params = jax.eval_shape(partial(init_params, job))
    axes, shapes = nn.get_partition_spec(params), nn.unbox(params)
    return axes, shapes, logical_to_mesh(axes, AXIS_RULES, job.mesh, shapes)


def plan_muon(job: Job) -> tuple[Matrices, MatrixPlan]:
    """Returns which parameters hold matrices, and who computes with which.

    With ZeRO the momentum is sharded over `data`, too, and matrices are handed out from there.
    """
    axes, shapes, layout = lay_out_parameters(job)
    if job.config.zero:
        layout = extend_over(layout, shapes, job.mesh, "data")
    matrices = Matrices.by_logical_axes(axes)
    return matrices, plan_matrices(shapes, layout.shardings, job.mesh, matrices)


def muon_for(job: Job) -> Callable[..., Any]:
    """Returns a constructor of Muon, or MuonH, as planned for the mesh, with AdamW for the head."""
    matrices, plan = plan_muon(job)

    def muon_and_adamw(learning_rate: Any, *, b2: float, weight_decay: float) -> Any:
        rest = optax.adamw(learning_rate, b2=b2, weight_decay=weight_decay)
        if job.config.optimizer == "muonh":  # the matrices' norms stay: nothing decays
            direction = scale_by_muon(matrices=matrices, plan=plan)
            return hyperball(direction, matrices, learning_rate, rest=rest)
        return muon(
            learning_rate,
            matrices=matrices,
            plan=plan,
            rest=rest,
            weight_decay=weight_decay,
            scale="rms",  # for learning rates of AdamW
        )

    return muon_and_adamw


def make_groups(job: Job) -> MultiOptimizer:
    """Returns AdamW for matrices, without decay for norms and biases, and Adafactor for the table.

    Adafactor gets the learning rate with every step, as in T5X. With `--optimizer muon`, or
    `muonh`, the matrices get Muon, all but the head.
    """
    config = job.config
    rate = make_schedule(config)
    table: OptimizerDef = Adafactor(multiply_by_parameter_scale=False)
    adamw: Callable[..., OptimizerDef] = partial(opt.adamw, rate, b2=0.98)
    if config.average or (config.weights, config.state) != ("float32", "float32"):
        table = wrapped(config, adafactor)(config.learning_rate, multiply_by_parameter_scale=False)
        adamw = partial(wrapped(config, optax.adamw), rate, b2=0.98)
    matrices = adamw
    if config.optimizer != "adamw":
        matrices = partial(wrapped(config, muon_for(job)), rate, b2=0.98)
    return MultiOptimizer.from_rules(
        [
            ("embedding", "embedding", table),
            ("vectors", ".*/(scale|bias)", adamw(weight_decay=0.0)),
            ("matrices", "head|.*/(qkv|in|out)", matrices(weight_decay=config.weight_decay)),
        ]
    )


def init_params(job: Job) -> Any:
    """Returns the initial parameters in Flax boxes, which name their dimensions."""
    tokens = jnp.zeros((1, job.config.sequence_length), jnp.uint8)
    params = job.model.init(jax.random.key(job.config.seed), tokens)["params"]
    dtype = job.config.weights.partition("-")[0]
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def plan_optimizer(job: Job) -> Placement:
    """Returns the planned optimizer and its placement; allocates nothing."""
    params = jax.eval_shape(partial(init_params, job))
    return place(make_groups(job), params, job.mesh, zero=job.config.zero)


def create_optimizer(job: Job, placement: Placement) -> Optimizer:
    """Creates the sharded optimizer; no device ever holds more than its shards."""

    def create() -> Optimizer:
        return placement.optimizer.optimizer_def.create(nn.unbox(init_params(job)))

    optimizer: Optimizer = jax.jit(create, out_shardings=placement.shardings)()
    return optimizer


def loss_and_gradients(
    job: Job, params: Any, windows: jax.Array
) -> tuple[jax.Array, Any, jax.Array]:
    """Returns the mean loss over a batch, its gradients, and how many sequences they are of.

    With `--skip-nonfinite`, these are the sequences of the microbatches that were not dropped; of
    none, loss and gradients are zeros.
    """
    config = job.config

    def mean_loss(params: Any, windows: jax.Array) -> jax.Array:
        return next_byte_loss(job.model, params, windows).mean()

    if config.microbatches == 1 and not config.skip_nonfinite:
        loss, grads = jax.value_and_grad(mean_loss)(params, windows)
        return loss, grads, jnp.int32(config.batch_size)
    value_and_grad = accumulate_gradients(
        mean_loss,
        num_microbatches=config.microbatches,
        weights="examples",
        skip_fn="non_finite" if config.skip_nonfinite else None,
        with_metrics=True,
        reduce="deferred",  # gradients are summed over `data` once a step, not once a microbatch
        mesh=job.mesh,
    )
    (loss, metrics), grads = value_and_grad(params, windows)
    return loss, grads, metrics.weight


class WholeStep:
    """What `guard` guards: a step of all groups at once, as `apply` on parameters and state.

    Args:
      optimizer: its definition is what counts.
      update: from an optimizer and gradients to the optimizer after the step.
    """

    def __init__(self, optimizer: Optimizer, update: Callable[[Optimizer, Any], Optimizer]) -> None:
        self._optimizer, self._update = optimizer, update

    def init(self, params: Any) -> tuple[()]:
        """Returns nothing: the guard is lent the state of the optimizer for each step."""
        del params
        return ()

    def apply(self, params: Any, state: OptimizerState, grads: Any, **_: Any) -> Any:
        """Makes the step."""
        after = self._update(self._optimizer.replace(target=params, state=state), grads)
        return after.target, after.state


def guarded(
    optimizer: Optimizer, update: Callable[[Optimizer, Any], Optimizer]
) -> ParamsTransformation:
    """Returns a step that is skipped where it would harm the run.

    That is where the loss, or the norm of gradients or updates, is a spike or not finite.
    """
    step = WholeStep(optimizer, update)
    return guard(step, update_norm=Spike(), max_consecutive=MOST_SKIPPED)


def guarded_step(
    optimizer: Optimizer,
    update: Callable[[Optimizer, Any], Optimizer],
    guard_state: GuardState,
    grads: Any,
    loss: jax.Array,
) -> tuple[Optimizer, GuardState]:
    """Makes a step, or does not; a batch is counted in either case.

    Args:
      optimizer: before the step.
      update: what makes it.
      guard_state: what the guard knows.
      grads: the gradients.
      loss: NaN if there is none.
    """
    lent = guard_state._replace(inner=optimizer.state)
    params, lent = guarded(optimizer, update).apply(optimizer.target, lent, grads, loss=loss)
    step = increment_step(optimizer.state.step)  # the next batch is another one
    after = optimizer.replace(target=params, state=lent.inner.replace(step=step))
    return after, lent._replace(inner=())


class GoodStates:
    """The last good states of a guarded run, on the host, for when it cannot continue."""

    def __init__(self) -> None:
        self._held, self._restored = rollback(keep=GOOD_KEPT), 0

    def take(self, step: int, optimizer: Optimizer, guard_state: GuardState) -> None:
        """Copies a state now and then, if its step was not skipped."""
        if step % GOOD_EVERY == 0 and self._held.take(step, (optimizer, guard_state)):
            self._restored = 0

    def restore(self) -> tuple[int, tuple[Optimizer, GuardState]] | None:
        """Returns the last one with its step; `None` if there is none, or none has helped."""
        if not self._held.steps or self._restored == GOOD_KEPT:
            return None
        self._restored += 1
        return self._held.restore()


def new_guard(job: Job, placement: Placement) -> tuple[GuardState, ...]:
    """Returns what the guard knows before the first step, which is nothing; `()` without one."""
    if not job.config.guard:
        return ()
    optimizer = placement.optimizer
    state = guarded(optimizer, lambda optimizer, _: optimizer).init(optimizer.target)
    return (jax.device_put(state, everywhere(job)),)


def restore_guard(
    guard_state: tuple[GuardState, ...], saved: Mapping[str, Any]
) -> tuple[GuardState, ...]:
    """Returns what the guard knew when the run was saved; `()` where it continues without one."""
    leaves, structure = jax.tree.flatten(guard_state)
    placed = [jax.device_put(saved[str(i)], leaf.sharding) for i, leaf in enumerate(leaves)]
    restored: tuple[GuardState, ...] = jax.tree.unflatten(structure, placed)
    return restored


def everywhere(job: Job) -> NamedSharding:
    """Returns the sharding of scalars: a copy on every device."""
    return NamedSharding(job.mesh, PartitionSpec())


def train_step(
    job: Job,
    optimizer: Optimizer,
    windows: jax.Array,
    overrides: Mapping[str, Any],
    guard_state: GuardState | None = None,
) -> tuple[Optimizer, dict[str, Any]]:
    """Applies one update, or none if `--guard` or `--skip-nonfinite` drops the whole batch.

    Args:
      job: the run.
      optimizer: parameters and state.
      windows: `[batch, n]` bytes.
      overrides: hyper-parameters for this step, such as `learning_rate`; traced, so that one
        compiled step serves all their values.
      guard_state: what the guard knows, with `--guard`.

    Returns:
      The new optimizer, and what happened: the learning rate is the one that was applied,
      `groups` has the norms of each group, `clipped` is 1 where the gradient was clipped, and
      `guard` is what the guard knows now.
    """
    loss, grads, kept = loss_and_gradients(job, optimizer.target, windows)
    # Without this XLA takes the shards of state under ZeRO back into the model's activations.
    grads = jax.lax.with_sharding_constraint(grads, lay_out_parameters(job)[2].shardings)
    matrices = make_groups(job).split(optimizer)["matrices"]
    clip = optax.clip_by_global_norm(job.config.clip)  # over all groups
    rate = resolve_hyper_params(matrices, **overrides).learning_rate

    def update(optimizer: Optimizer, grads: Any) -> Optimizer:
        clipped, _ = clip.update(grads, optax.EmptyState())
        return optimizer.apply_gradient(
            clipped, **overrides, group_overrides={"embedding": {"learning_rate": rate}}
        )

    metrics: dict[str, Any] = {}
    if guard_state is None:
        updated = update(optimizer, grads)
    else:
        known = jnp.where(kept > 0, loss, jnp.nan)  # of a batch that was dropped there is none
        updated, guard_state = guarded_step(optimizer, update, guard_state, grads, known)
        guard_state = jax.lax.with_sharding_constraint(guard_state, everywhere(job))
        metrics = {"guard": guard_state}
    norms = group_metrics(optimizer, grads, updated)
    clipping = clip_metrics(norms, job.config.clip)
    metrics |= {
        "loss": loss,
        "bits_per_byte": loss / math.log(2),
        "learning_rate": rate,
        "grad_norm": clipping.norm,
        "clipped": clipping.clipped,
        "groups": norms,
    }
    if job.config.skip_nonfinite:
        metrics["skipped"] = job.config.batch_size - kept
        step = updated.state.step  # counts batches: the next one is not this one again
        updated = jax.tree.map(partial(jnp.where, kept > 0), updated, optimizer)
        updated = updated.replace(state=updated.state.replace(step=step))
    return updated, metrics


def compile_step(
    job: Job, placement: Placement, overrides: Mapping[str, Any], *guard_state: GuardState
) -> jax.stages.Compiled:
    """Compiles the training step before the optimizer is created."""
    shape = (job.config.batch_size, job.config.sequence_length + 1)
    step = jax.jit(
        partial(train_step, job),
        donate_argnums=0,
        out_shardings=(placement.shardings, None),
    )
    windows = jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=job.rows)
    return step.lower(placement.optimizer, windows, overrides, *guard_state).compile()


def train(
    job: Job,
    folder: RunFolder,
    step_function: Callable[..., Any],
    optimizer: Optimizer,
    batches: Batches,
    overrides: Mapping[str, Any],
    *guard_state: GuardState,
) -> tuple[Optimizer, bool]:
    """Runs the remaining steps, or until a signal arrives.

    Args:
      job: the run.
      folder: where metrics and checkpoints go.
      step_function: `train_step`, compiled.
      optimizer: where to start; donated.
      batches: what to learn from.
      overrides: hyper-parameters to use instead of those of the definition.
      *guard_state: what the guard knows, with `--guard`.

    Returns:
      The optimizer, and whether all steps are done.
    """
    config, done = job.config, int(optimizer.state.step)
    tokens = config.batch_size * config.sequence_length
    with (
        Checkpointer(folder.checkpoints, max_to_keep=KEPT) as checkpoints,
        contextlib.closing(Progress(done, config.steps, tokens, is_shown=is_first())) as progress,
        stop_requests() as must_stop,
    ):
        checkpoints.discard_after(done)  # they are damaged, and will be repeated,
        folder.forget_after(done)  # as will be what was logged since
        is_stopped, skipped, good = False, 0, GoodStates()
        measure = evaluator(job)
        for step in range(done + 1, config.steps + 1):
            optimizer, metrics = step_function(
                optimizer, job.shard(next(batches)), overrides, *guard_state
            )
            guard_state = (metrics.pop("guard"),) if guard_state else ()
            line = {"step": step, **numbers(jax.device_get(metrics))}
            for found in jax.device_get([report(state) for state in guard_state]):
                if found.was_skipped:
                    reason = (Reason(int(found.reason)).name or "").lower()
                    line |= {"skipped": config.batch_size, "reason": reason}
            skipped = skipped + 1 if line.get("skipped") == config.batch_size else 0
            if skipped == MOST_SKIPPED:
                last_good = good.restore() if guard_state else None
                why = "skipped by --guard" if guard_state else "without anything finite"
                if last_good is None:
                    raise UsageError(
                        f"{skipped} batches in a row were {why}, up to step {step}: take a lower "
                        "--learning-rate"
                    )
                number, (restored, restored_guard) = last_good
                counted = restored.state.replace(step=optimizer.state.step)  # of batches
                optimizer, guard_state = restored.replace(state=counted), (restored_guard,)
                skipped = 0
                progress.note(f"{MOST_SKIPPED} batches in a row were {why}: back to step {number}")
                line = {"step": step, "back_to": number}
            elif skipped:  # there is nothing else to tell
                shown = ("step", "skipped", "reason")
                line = {name: line[name] for name in shown if name in line}
            elif not math.isfinite(line["loss"]):
                raise UsageError(
                    f"the loss is {line['loss']} at step {step}: take a lower --learning-rate, or "
                    "leave out what is not finite by --skip-nonfinite"
                )
            for state in guard_state:
                good.take(step, optimizer, state)
            line["tokens_per_s"] = progress.speed()
            is_saved = step % config.checkpoint_every == 0 or step == config.steps
            if config.average and is_saved:
                with progress.during("evaluating"):
                    line["held_out"] = {
                        "trained": measure(optimizer.target, SHORT),
                        "average": measure(optimizer.evaluating().target, SHORT),
                    }
            folder.log(line)
            progress.show(step, line)
            is_stopped = must_stop(step)
            if is_stopped or is_saved:
                extras = {"batches": batches.state(), "guard": jax.tree.leaves(guard_state)}
                with progress.during("saving"):
                    checkpoints.save(step, optimizer, extras=extras)
            if is_stopped:
                break
        with progress.during("saving"):
            checkpoints.wait()
    return optimizer, not is_stopped


def start(arguments: Arguments) -> tuple[Job, RunFolder]:
    """Starts a new run and creates its folder."""
    job = make_job(Config(**arguments.given).check(), arguments.cluster.processes)
    return job, RunFolder(arguments.out or Path("runs", time.strftime("%Y%m%d-%H%M%S")))


def resume(path: Path, arguments: Arguments) -> tuple[Job, RunFolder]:
    """Resumes the run in a folder."""
    folder = RunFolder(path)
    saved = folder.read_config()
    config = continue_config(saved, arguments.given, path)
    job = make_job(config, arguments.cluster.processes)
    if saved.get("text_sha256") != job.text.sha256:
        raise UsageError(
            f"{job.text.source} is not, or no longer, the text that {path} learns from"
        )
    return job, folder


def plan_resume(placement: Placement, saved: SavedStep, path: Path) -> Plan[Optimizer]:
    """Plans the restore of every leaf, independently of the mesh that it was saved from."""
    try:
        return plan_restore(saved, placement.optimizer).check()
    except PlanError as error:
        summary, *_ = str(error.plan).splitlines()
        reason = error.plan.problems[0]
        raise UsageError(
            f"the checkpoint of {path} is of another configuration: {summary}; {reason}"
        ) from error


def run(arguments: Arguments) -> int:
    """Trains with the other processes; returns the exit code."""
    try:
        with together(arguments.cluster):
            return train_and_report(arguments)
    except CheckpointError as error:
        raise UsageError(str(error)) from error


def train_and_report(arguments: Arguments) -> int:
    """Runs the program; returns the exit code."""
    overrides = {}
    with announced("Finding the text and the devices", is_shown=not arguments.cluster.process_id):
        if arguments.resume is None:
            job, folder = start(arguments)
        else:
            job, folder = resume(arguments.resume, arguments)
            if "learning_rate" in arguments.given:
                overrides["learning_rate"] = np.float32(arguments.given["learning_rate"])
    busy = partial(announced, is_shown=is_first())
    with busy("Planning"):
        placement = plan_optimizer(job)
        check_memory(job, placement.plan)
        if arguments.resume is None:
            saved = None
            config = dataclasses.asdict(job.config) | {"text_sha256": job.text.sha256}
            first_of_all(partial(folder.create, config))
        else:
            saved = folder.latest_checkpoint()
        if saved:
            plan_resume(placement, saved, folder.path)  # does it fit?
    aim = (
        "Trains a byte-level language model, then compares its bits per byte with gzip's, and its "
        "bytes per device with the plan and with plain Optax."
    )
    size = sum(leaf.size for leaf in jax.tree.leaves(placement.optimizer.target))
    since = f", from step {saved.step} on" if saved else ""
    about = (
        f"{folder.path}: {size:,} parameters on {job.config.mesh}, "
        f"{len(job.text.train):,} bytes of {job.text.source}{since}"
    )
    say(
        folded(aim),
        folded(about),
        folded(describe(placement.optimizer), table_until="hyper-parameters"),
        folded(describe_plan(placement.plan)),
    )
    with busy("Compiling the training step"):
        guard_state = new_guard(job, placement)
        step_function = compile_step(job, placement, overrides, *guard_state)
        is_muon = job.config.optimizer != "adamw"
        checked = check_step(step_function, placement, state_gathers="any" if is_muon else "error")
        if is_muon:  # which moves its matrices, and as planned
            plan_muon(job)[1].check(step_function)
    say(folded(describe_report(checked)))
    folder.save_placement(f"{placement.plan}\n\n{checked.details()}\n")
    batches = job.batches()
    with busy("Restoring the optimizer" if saved else "Creating the optimizer"):
        if saved:
            optimizer, extras = folder.restore(placement.optimizer, saved.step)
            batches.restore(extras["batches"])
            if saved_guard := extras.get("guard"):
                guard_state = restore_guard(guard_state, saved_guard)
        else:
            optimizer = create_optimizer(job, placement)
        jax.block_until_ready(optimizer)
    optimizer, is_finished = train(
        job, folder, step_function, optimizer, batches, overrides, *guard_state
    )
    if is_finished:
        write_report(job, folder, optimizer, placement.plan)
        return 0
    folder.plot({})
    again = ["hatch", "run", "dev:train", "--resume", str(folder.path)]
    if arguments.resume is not None:
        again += repeated_flags(arguments.given, folder.read_config())
    say(f"Stopped after step {int(optimizer.state.step)}. Continue: {shlex.join(again)}")
    return 130
