"""Sampling options: per-sequence arrays on the device, checked once on the host."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jspec.types import Array

_INT32_MAX = 2**31 - 1
_WIDTH = 8  # lists of ids are padded to a multiple of this, so that shapes stay put


@struct.dataclass
class Sampling:
    """What each sequence of a batch asked for; one row a sequence.

    Every field is always present, so a change of any value never recompiles; only a
    list of ids that outgrows its width ``J`` (a multiple of 8) does.

    Attributes:
      temperature: ``[B]`` float32, 0 = greedy.
      top_k: ``[B]`` int32, 0 = off.  top_p: ``[B]`` float32, 1 = off.
      min_p: ``[B]`` float32, 0 = off; relative to the most probable token.
      repetition_penalty: ``[B]`` float32, 1 = off; over prompt and output.
      presence_penalty, frequency_penalty: ``[B]`` float32, 0 = off; over output only.
      bias_id, bias_value: ``[B, J]`` int32 (-1 = padding) and float32.
      forbidden: ``[B, J]`` int32 ids, -1 = padding.
      forced_at, forced_id: ``[B, J]`` int32; new token number ``forced_at`` (from 0,
        -1 = padding) is ``forced_id``.
      min_new_tokens: ``[B]`` int32.
      eos: ``[E]`` int32 ids that ``min_new_tokens`` masks, -1 = padding.
      key: ``[B]`` typed keys, one stream a sequence.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition_penalty: Array
    presence_penalty: Array
    frequency_penalty: Array
    bias_id: Array
    bias_value: Array
    forbidden: Array
    forced_at: Array
    forced_id: Array
    min_new_tokens: Array
    eos: Array
    key: Array


class _Number(NamedTuple):
    """An option with one number a row: its default, type, test and the test in words."""

    default: float
    kind: type
    valid: Callable[[Any], bool]
    range: str


def _not_negative(x: float) -> bool:
    return 0 <= x < math.inf


_COUNT = _Number(0, int, _not_negative, "[0, inf); 0 turns it off")
_PENALTY = _Number(0.0, float, math.isfinite, "(-inf, inf); 0 turns it off")
_FACTOR = _Number(1.0, float, lambda x: 0 < x < math.inf, "(0, inf); 1 turns it off")
_NUMBERS = {
    "temperature": _Number(0.0, float, _not_negative, "[0, inf); 0 is greedy"),
    "top_k": _COUNT,
    "top_p": _Number(1.0, float, lambda x: 0 < x <= 1, "(0, 1]; 1 turns it off"),
    "min_p": _Number(0.0, float, lambda x: 0 <= x <= 1, "[0, 1]; 0 turns it off"),
    "repetition_penalty": _FACTOR,
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "min_new_tokens": _COUNT,
    "seed": _Number(0, int, lambda x: 0 <= x < 2**64, "[0, 2**64)"),
}


def options(
    batch: int, *, vocab_size: int, eos_ids: Sequence[int] = (), **kwargs: Any
) -> Sampling:
    """Checks sampling options and lays them out as arrays.

    A value is for every row, or a list of length ``batch`` with one for each. None
    means the default.

    Args:
      batch: number of sequences.
      vocab_size: ids must be below it.
      eos_ids: end-of-sequence ids, masked until ``min_new_tokens`` are decided.
      **kwargs: ``temperature`` (0 = greedy, the default), ``top_k``, ``top_p``,
        ``min_p``, ``repetition_penalty``, ``presence_penalty``, ``frequency_penalty``,
        ``min_new_tokens``: numbers, off unless given. ``logit_bias``: a dict id ->
        value to add, -inf allowed. ``forbidden_tokens``: a list of ids.
        ``forced_tokens``: a dict from the number of a new token (from 0) to its id.
        ``seed``: an int gives row ``i`` stream ``i`` of that seed, so rows differ; a
        list gives every row stream 0 of its own seed, so that a row repeats what the
        same seed yields alone, whatever else is in the batch.

    Raises:
      ValueError: unknown option, value out of range, list of a wrong length, id
        outside the vocabulary, a token both forced and forbidden, or no token left.
    """
    known = [*_NUMBERS, "logit_bias", "forbidden_tokens", "forced_tokens"]
    for name in set(kwargs) - set(known):
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"unknown sampling option {name!r};{hint} known options: {', '.join(known)}"
        )
    if batch < 1:
        raise ValueError(f"batch = {batch}; it must be at least 1")

    def token(name, value, row=None):
        return _token(name, value, row, vocab_size)

    number = {n: _numbers(n, kwargs.get(n), batch) for n in _NUMBERS}
    bias = [
        {token("logit_bias", t, row): _bias(v, row) for t, v in given.items()}
        for row, given in enumerate(_rows("logit_bias", kwargs, batch, dict))
    ]
    forbidden = [
        [token("forbidden_tokens", t, row) for t in given]
        for row, given in enumerate(_rows("forbidden_tokens", kwargs, batch, list))
    ]
    forced = [
        {_place(i, row): token("forced_tokens", t, row) for i, t in given.items()}
        for row, given in enumerate(_rows("forced_tokens", kwargs, batch, dict))
    ]
    eos = [token("eos_ids", t) for t in eos_ids]
    for row in range(batch):
        banned = set(forbidden[row])
        banned |= {t for t, value in bias[row].items() if value == -math.inf}
        masked = eos if number["min_new_tokens"][row] else []
        _check_possible(row, banned, forced[row].values(), masked, vocab_size)

    seeds = number.pop("seed")
    shared = not _is_list(kwargs.get("seed"))
    number["top_k"] = [min(k, vocab_size) for k in number["top_k"]]
    number["min_new_tokens"] = [min(n, _INT32_MAX) for n in number["min_new_tokens"]]
    dtype = {int: jnp.int32, float: jnp.float32}
    return Sampling(
        **{n: jnp.asarray(v, dtype[_NUMBERS[n].kind]) for n, v in number.items()},
        bias_id=_table(bias, -1, jnp.int32),
        bias_value=_table([d.values() for d in bias], 0, jnp.float32),
        forbidden=_table(forbidden, -1, jnp.int32),
        forced_at=_table(forced, -1, jnp.int32),
        forced_id=_table([d.values() for d in forced], -1, jnp.int32),
        eos=_table([eos], -1, jnp.int32)[0],
        key=_keys(seeds, range(batch) if shared else [0] * batch),
    )


def _is_list(value: Any) -> bool:
    """A list, tuple or array (but not a zero-dimensional array)."""
    return isinstance(value, list | tuple | range) or getattr(value, "ndim", 0) > 0


def _check_length(name: str, values: Sequence, batch: int) -> None:
    if len(values) != batch:
        raise ValueError(
            f"{name} is a list of {len(values)} but the batch has {batch} sequences; "
            "give one value for all or one for each"
        )


def _numbers(name: str, value: Any, batch: int) -> list:
    """One checked number a row."""
    if not _is_list(value):
        return [_number(name, value, None)] * batch
    _check_length(name, value, batch)
    return [_number(name, v, row) for row, v in enumerate(value)]


def _number(name: str, value: Any, row: int | None) -> Any:
    default, kind, valid, allowed = _NUMBERS[name]
    if value is None:
        return default
    number = _integer(value) if kind is int else _float32(value)
    if number is None or not valid(number):
        noun = "an integer" if kind is int else "a number"
        raise ValueError(f"{_at(name, value, row)} must be {noun} in {allowed}")
    return number


def _at(name: str, value: Any, row: int | None) -> str:
    return f"{name} = {value!r}" + ("" if row is None else f" in row {row}")


def _integer(value: Any) -> int | None:
    """The value as an int; None if it is a bool, a float or not a number."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _float32(value: Any) -> float | None:
    """The value as the float that the device will see; None if it is not a number."""
    if isinstance(value, bool | np.bool_ | str | bytes):
        return None
    try:
        with np.errstate(over="ignore", under="ignore"):
            return float(np.float32(float(value)))
    except (TypeError, ValueError, OverflowError):
        return None


def _rows(name: str, kwargs: Mapping[str, Any], batch: int, kind: type) -> list:
    """One dict or list a row, from one for all rows or from a list of them."""
    value: Any = kwargs.get(name)
    nested = _is_list(value) and any(v is None or _is_collection(v) for v in value)
    if nested:
        _check_length(name, value, batch)
    rows = list(value) if nested else [value] * batch
    for row, v in enumerate(rows):
        fits = _is_collection(v) and isinstance(v, Mapping) == (kind is dict)
        if v is not None and not fits:
            form = "a dict" if kind is dict else "a list of ids"
            raise ValueError(
                f"{_at(name, v, row)} must be {form}, or a list with one for each row"
            )
    return [kind() if v is None else kind(v) for v in rows]


def _is_collection(value: Any) -> bool:
    return isinstance(value, Mapping | set | frozenset) or _is_list(value)


def _token(name: str, value: Any, row: int | None, vocab_size: int) -> int:
    token = _integer(value)
    if token is None or not 0 <= token < vocab_size:
        where = "" if row is None else f" in row {row}"
        raise ValueError(
            f"{name} has id {value!r}{where}; ids are integers in [0, {vocab_size})"
        )
    return token


def _bias(value: Any, row: int) -> float:
    bias = _float32(value)
    if bias is None or math.isnan(bias) or bias == math.inf:
        raise ValueError(
            f"logit_bias has value {value!r} in row {row}; values are finite numbers, "
            "or -inf to forbid the token"
        )
    return bias


def _place(value: Any, row: int) -> int:
    place = _integer(value)
    if place is None or not 0 <= place <= _INT32_MAX:
        raise ValueError(
            f"forced_tokens has position {value!r} in row {row}; positions count the "
            "new tokens and are integers >= 0"
        )
    return place


def _check_possible(
    row: int, banned: set, forced: Iterable, masked: Iterable, vocab_size: int
) -> None:
    clash = sorted(banned & set(forced))
    if clash:
        raise ValueError(
            f"row {row} both forces and forbids token {clash[0]}; remove it from "
            "forced_tokens, or from forbidden_tokens and logit_bias = -inf"
        )
    if len(banned.union(masked)) >= vocab_size:
        raise ValueError(
            f"row {row} forbids all {vocab_size} tokens; leave one that is not in "
            "forbidden_tokens, not at logit_bias = -inf and, with min_new_tokens, not "
            "an end of sequence"
        )


def _table(rows: Sequence[Iterable], fill: float, dtype: Any) -> Array:
    """Ragged rows as ``[B, J]``, padded to a multiple of 8."""
    lists = [list(row) for row in rows]
    width = max(_WIDTH, *(-(-len(row) // _WIDTH) * _WIDTH for row in lists))
    return jnp.asarray([row + [fill] * (width - len(row)) for row in lists], dtype)


def _keys(seeds: Sequence[int], streams: Iterable[int]) -> Array:
    """``[B]`` keys of 64-bit seeds; all of the seed counts, not its lower half only."""
    low = np.asarray([s & 0xFFFFFFFF for s in seeds], np.uint32)
    high = np.asarray([s >> 32 for s in seeds], np.uint32)
    return _key(low, high, np.asarray(list(streams), np.uint32))


@jax.jit  # traced once a batch size: untraced it costs a request 7 ms
@jax.vmap
def _key(low: Array, high: Array, stream: Array) -> Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(low), high), stream)
