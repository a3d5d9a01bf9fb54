"""Timing of compiled loops: the host's share spread thin, rivals taking turns."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jspec.roofline import Chip
from jspec.types import Array

# No step takes less than the clock can tell, so that none seems to be free.
_TICK = time.get_clock_info("perf_counter").resolution


def copy_bandwidth(megabytes: int = 256, runs: int = 7) -> float:
    """Memory bandwidth in GB/s (1e9 bytes): the fastest of ``runs`` reads of an array.

    A product of a matrix with a vector, spread by XLA over all cores: what reads memory
    fastest, and what decoding does.
    """
    rows = megabytes * 2**20 // (4 * 4096)
    matrix, vector = jnp.ones((rows, 4096)), jnp.ones(4096)
    read = jax.jit(lambda m, v: m @ v)
    jax.block_until_ready(read(matrix, vector))
    best = min(_seconds(read, matrix, vector) for _ in range(runs))
    return matrix.nbytes / best / 1e9


def measured_chip(runs: int = 7) -> Chip:
    """This device as a roofline: ``copy_bandwidth``, and the fastest of ``runs`` products
    of two 1024 x 1024 float32 matrices."""
    size = 1024
    square, product = jnp.ones((size, size)), jax.jit(jnp.matmul)
    jax.block_until_ready(product(square, square))
    best = min(_seconds(product, square, square) for _ in range(runs))
    bandwidth = copy_bandwidth(runs=runs) * 1e9
    return Chip("this device", 2 * size**3 / best, bandwidth)


def in_turn(
    programs: Mapping[Any, Callable[[int], None]],
    repetitions: int,
    runs: int,
    least: float = 0.0,
) -> dict[Any, float]:
    """Median milliseconds of one step of every loop, taking turns.

    What a call costs without a step is taken off. With one step a call, each finds the
    processor's caches as another has left them; with many, as it left them itself.

    Args:
      programs: name to a function that runs so many steps, or none, and waits for them.
      repetitions: steps a call.  runs: timed calls of each loop.
      least: seconds a call shall take: a loop of shorter steps runs more of them, for
        what the call costs varies by more than they take.

    Raises:
      ValueError: unless ``repetitions`` and ``runs`` are at least 1.
    """
    if repetitions < 1 or runs < 1:
        raise ValueError(f"repetitions {repetitions} and runs {runs} must be >= 1")
    for loop in programs.values():
        loop(1)  # compiles
    counts = {n: _steps(loop, repetitions, least) for n, loop in programs.items()}
    times: dict[Any, list[float]] = {name: [] for name in programs}
    for _ in range(runs):
        for name, loop in programs.items():
            call = min(_seconds(loop, 0) for _ in range(3))
            times[name].append(max(_seconds(loop, counts[name]) - call, _TICK))
    return {n: 1e3 * statistics.median(t) / counts[n] for n, t in times.items()}


def _steps(loop: Callable[[int], None], count: int, least: float) -> int:
    """``count``, doubled until so many steps take ``least`` seconds."""
    while least and _seconds(loop, count) < least:
        count *= 2
    return count


def _seconds(function, *arguments) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - start


# (*static, given, carry, zero) -> (carry, results). ``zero`` is 0, which XLA cannot know.
Step = Callable[..., tuple[Any, Any]]


class Loop:
    """A step compiled into a loop, and the carry it goes on with.

    Args:
      step: a function of the module level, so that equal loops share a program.
      static: hashable arguments of the step.
      carry: arrays, donated to every call.
    """

    def __init__(self, step: Step, static: tuple, carry: Any):
        self._program = _program(step, static)
        self.carry = carry

    def run(self, given: Any, count: int) -> None:
        """``count`` steps with the arrays ``given``; waits for them."""
        done = self._program(given, self.carry, jnp.int32(count))
        self.carry, _ = jax.block_until_ready(done)


@functools.cache
def _program(step: Step, static: tuple) -> Callable:
    @functools.partial(jax.jit, donate_argnums=1)
    def many(given, carry, count):
        def body(_, state):
            carry, zero = state
            carry, results = step(*static, given, carry, zero)
            return carry, _zero(results)

        # The zero is returned too: a step may change nothing else.
        return lax.fori_loop(0, count, body, (carry, jnp.int32(0)))

    return many


# Elements: larger leaves of a drafter's state are caches and tables.
SMALL = 1 << 14


def depending(tree: Any, zero: Array, most: int | None = None) -> Any:
    """The same arrays, depending on the step before.

    What a loop never changes XLA computes once, before it: a step that reads such arrays
    would be timed without what it makes of them alone.

    Args:
      tree: arrays; those that are no numbers stay as they are.
      zero: as a ``Step`` is given it.
      most: leave out arrays of more elements, which would be copied; None is none.
    """

    def plus(x: Array) -> Array:
        is_number = jnp.issubdtype(x.dtype, jnp.number)
        return x + zero.astype(x.dtype) if is_number else x

    return jax.tree.map(
        lambda x: plus(x) if most is None or x.size <= most else x, tree
    )


def _zero(results: Any) -> Array:
    """0 that depends on every number of the small leaves of ``results``."""
    total = jnp.float32(0)
    for leaf in jax.tree.leaves(results):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        total += jnp.sum(leaf.astype(jnp.float32))
    return (total == jnp.float32(1.2345e33)).astype(jnp.int32)
