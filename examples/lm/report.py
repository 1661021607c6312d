"""The report of a finished run: a sample, and its prediction of held-out text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from opt_core import Optimizer
from opt_partition import MemoryPlan

from lm import baselines
from lm.data import batches_in_order
from lm.job import Job
from lm.model import next_byte_loss
from lm.placement import describe_bytes
from lm.processes import is_first, say
from lm.progress import announced, folded
from lm.run_folder import RunFolder
from lm.sample import generate

SHORT = 4
"""Batches of the held-out text that are evaluated while training continues."""


def evaluator(job: Job) -> Callable[..., float]:
    """Returns a function from parameters to bits per byte of the held-out text.

    Its further arguments are how many batches to evaluate, by default all, and what to call with
    the share that is done.
    """

    @jax.jit
    def nats(params: Any, windows: jax.Array, counts: jax.Array) -> jax.Array:
        return jnp.sum(next_byte_loss(job.model, params, windows), where=counts)

    def evaluate(
        params: Any,
        most: int | None = None,
        shown: Callable[[float], None] = lambda share: None,
    ) -> float:
        batches = batches_in_order(
            job.text.held_out,
            batch_size=job.config.batch_size,
            window=job.config.sequence_length + 1,
            context=(job.config.sequence_length + 1) // 2,
        )
        predictions, done, total = len(job.text.held_out) - 1, 0, 0.0
        per_batch = job.config.batch_size * (job.config.sequence_length + 1) // 2
        every = max(1, predictions // per_batch // most) if most else 1  # all over the text
        for windows, counts in itertools.islice(batches, 0, most and most * every, every):
            # Waits for each: on virtual devices, XLA does not run more than 32 programs ahead.
            total += float(nats(params, job.shard(windows), job.shard(counts)))
            done += int(counts.sum())
            shown(done / predictions)
        return total / math.log(2) / done

    return evaluate


def write_report(job: Job, folder: RunFolder, optimizer: Optimizer, plan: MemoryPlan) -> None:
    """Writes a sample, measures the model against simpler ones and the memory against the plan.

    Sampled and evaluated is the average of the parameters, where there is one.
    """
    config, text = job.config, job.text
    params = optimizer.evaluating().target
    busy = partial(announced, is_shown=is_first())
    with busy("Writing a sample"):
        sample = generate(
            job.model,
            params,
            config.prompt,
            length=config.sample_bytes,
            context=config.sequence_length,
            seed=config.seed,
        )
    with busy("Evaluating on held-out text") as shown:
        evaluate = evaluator(job)
        bits = {"transformer": evaluate(params, None, shown)}
        if config.average:
            bits["not averaged"] = evaluate(optimizer.target)
    with busy("Evaluating simpler models, and drawing"):
        bits["bigram"] = baselines.bigram_bits(text.train, text.held_out)
        bits["unigram"] = baselines.unigram_bits(text.train, text.held_out)
        bits["gzip"] = baselines.gzip_bits(text.held_out)
        name = config.optimizer.removesuffix("h")  # Optax has no Hyperball
        module = optax if name == "adamw" else optax.contrib
        plain = getattr(module, name)(config.learning_rate)
        counts, table = describe_bytes(plan, optimizer, plain)
        folder.save_results(
            {"held_out_bits_per_byte": bits, "bytes_per_device": counts, "sample": sample}
        )
        folder.plot(bits)
    files = "plot.png metrics.jsonl results.json placement.txt config.json checkpoints/"
    say(
        f"\nSample\n{sample}\n\nBits per byte of {len(text.held_out)} held-out bytes",
        *(f"  {name:<12}{value:6.3f}" for name, value in bits.items()),
        f"\n{table}\n\n{folded(f'{folder.path}: {files}')}",
    )
