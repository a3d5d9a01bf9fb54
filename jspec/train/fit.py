"""The training loop: steps, evaluations, checkpoints, and exact resumption.

Everything a step uses is a function of its number: the batch is ``data(step)``, the key
is folded from the seed and the step. A run that is killed and started again therefore
continues as if nothing had happened, bit for bit on the same device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh
from jax.tree_util import Partial

from jspec.train import metrics, parallel
from jspec.train.checkpoints import Checkpoints
from jspec.train.settings import remember
from jspec.train.signals import deferred, leave
from jspec.types import Array

Loss = Callable[[Any, Any, Array], tuple[Array, dict[str, Array]]]


@struct.dataclass
class TrainState:
    """What a run carries from step to step: ``params``, the optimizer's state and
    ``step``, int32, how many steps are done."""

    params: Any
    optimizer: Any
    step: Array


class Files(NamedTuple):
    """What a run leaves in its folder."""

    metrics: Path
    curve: Path
    checkpoints: Path


def files(out: str | Path) -> Files:
    """The paths in the folder ``out`` of a run."""
    out = Path(out)
    return Files(out / "metrics.jsonl", out / "curve.png", out / "checkpoints")


def fit(
    loss: Loss,
    params: Any,
    data: Callable[[int], Any],
    *,
    steps: int,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    out: str | Path,
    every: int = 500,
    evaluate: Callable[[Any], dict[str, Any]] | None = None,
    seed: int = 0,
    mesh: Mesh | None = None,
) -> Any:
    """Trains, or continues the run in ``out``, and returns the trained parameters.

    Each step adds a line to ``metrics.jsonl``; every ``every`` steps, and after the
    last, the run is evaluated and saved; at the end the curves are drawn. SIGTERM and
    Ctrl-C save, say how to go on and exit with the signal's status. Clipping, schedules
    and accumulation are the optimizer's: ``optax.chain``, ``optax.MultiSteps``.

    Args:
      loss: pure, ``(params, batch, key) -> (scalar, metrics)``, a mean over the batch.
        Arrays it needs but that are not trained (the target's head) are passed as
        ``jax.tree_util.Partial(loss, arrays)``, whose arguments come first; arrays in a
        plain closure would be compiled into the program.
      params: a pytree, where a new run begins. A run that is continued only takes its
        shapes.
      data: ``step -> batch``, a pytree of arrays whose first axes are rows and tokens.
        Step i sees ``data(i)``, from 0.
      steps: how many in all.
      optimizer: its schedule is part of the run: continue with the same.
      out: folder, made if it is missing.
      every: steps between checkpoints.
      evaluate: ``params -> {name: value}`` on held-out data, a number or a vector (of
        acceptance by depth, say); names appear in the metrics as ``eval/name``.
      seed: of the keys given to ``loss``.
      mesh: of one axis ``data`` that the batch's rows are split over
        (``parallel.data_mesh``); None is one device.

    Raises:
      ValueError: ``steps`` or ``every`` below 1; the folder holds a run with another
        seed, other parameters, another optimizer or more steps; rows that cannot be
        split evenly.
      FloatingPointError: the loss is not finite. The last checkpoint is from before.
      OSError: a file cannot be written; the last checkpoint is intact.
      SystemExit: after a signal.
    """
    if steps < 1 or every < 1:
        raise ValueError(f"steps {steps}, every {every}: both must be at least 1")
    paths = files(out)
    remember(Path(out), {"seed": seed})
    mesh = parallel.data_mesh(1) if mesh is None else mesh
    loss = parallel.replicate(
        loss if isinstance(loss, Partial) else Partial(loss), mesh
    )
    params = jax.tree.map(jnp.copy, params)  # the first step gives its arguments away
    state = TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))
    state = parallel.replicate(state, mesh)

    with Checkpoints(paths.checkpoints) as saved, deferred() as wish:
        if saved.latest is not None:
            state = saved.load(state)
        start = int(state.step)
        _check_steps(start, steps, out)
        with (
            metrics.Log(paths.metrics, start) as log,
            metrics.Meter("step", start, steps) as m,
        ):
            if start:
                m.say(f"continuing {out} after step {start}")
            batches = (parallel.shard(data(i), mesh) for i in range(start, steps))
            batch = next(batches, None)
            for number in range(start + 1, steps + 1):
                begin, tokens = time.perf_counter(), _tokens(batch)
                state, values = _step(loss, state, batch, seed, optimizer=optimizer)
                batch = next(batches, None)  # before this step is waited for
                line = {"step": number, **_plain(values)}
                _check_finite(line, saved.latest)
                stop, due = wish.number, number % every == 0 or number == steps
                if due and evaluate is not None:
                    line |= _evaluated(evaluate(state.params), number, m.say)
                line |= {"tokens": tokens, "seconds": time.perf_counter() - begin}
                log.write(line)
                m.advance(number, tokens, f"loss {line['loss']:.4g}, ")
                if due or stop is not None:
                    saved.save(number, state)
                if stop is not None:
                    leave(stop, f"saved after step {number} in {out}", m.say)
    metrics.curve(paths.metrics, paths.curve)
    return state.params


def _step_fn(loss, state: TrainState, batch, seed, *, optimizer):
    """One update; the key of a step is a function of the seed and its number."""
    key = jax.random.fold_in(jax.random.key(seed), state.step)

    def of(params):
        return loss(params, batch, key)

    (value, extra), grads = jax.value_and_grad(of, has_aux=True)(state.params)
    updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    values = {**extra, "loss": value, "grad_norm": optax.tree.norm(grads)}
    return TrainState(params, optimizer_state, state.step + 1), values


_step = jax.jit(_step_fn, static_argnames="optimizer", donate_argnames="state")


def _tokens(batch: Any) -> int:
    """Rows times tokens of the first array."""
    rows, tokens = jax.tree.leaves(batch)[0].shape[:2]
    return rows * tokens


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Numbers, and lists of numbers, for JSON."""
    return {name: np.asarray(value).tolist() for name, value in values.items()}


def _evaluated(found: dict[str, Any], step: int, say: Callable) -> dict[str, Any]:
    """Held-out metrics under their names in the file, and said aloud."""
    line = {f"eval/{name}": value for name, value in _plain(found).items()}
    said = [
        f"{name} " + " ".join(f"{v:.4g}" for v in np.ravel(value))
        for name, value in line.items()
    ]
    say(f"step {step}: " + ", ".join(said))
    return line


def _check_finite(line: dict, saved: int | None) -> None:
    if not math.isfinite(line["loss"]):
        raise FloatingPointError(
            f"the loss of step {line['step']} is {line['loss']}; the last checkpoint is "
            f"of step {saved}. Lower the learning rate or clip the gradient"
        )


def _check_steps(start: int, steps: int, out: str | Path) -> None:
    if start > steps:
        raise ValueError(
            f"the run in {out} has done {start} steps already, more than {steps}; ask "
            "for more, or choose another folder"
        )
