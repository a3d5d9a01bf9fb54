"""A corpus written by the target itself.

Drafters must learn the target's own words: an instruct model that is given only its
chat header writes a user's turn, then answers it. Given user's words are answered
likewise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jspec import sampling as smp
from jspec.models import Model
from jspec.sampling import Sampling
from jspec.train import conversing
from jspec.train.conversing import Given, Plan, Writing
from jspec.train.corpus import Conversation, write
from jspec.train.metrics import Meter
from jspec.train.settings import remember
from jspec.train.signals import Wish, deferred, leave
from jspec.train.template import fingerprint, template, user_tokens

_BURST = 32  # tokens a sequence between two looks of the host


class Job(NamedTuple):
    """Everything that parts are written with; ``rows`` and ``part`` as in ``selfgen``."""

    model: Model
    plan: Plan
    given: Given | None
    sampling: Sampling
    rows: int
    part: int
    out: Path


def selfgen(
    model: Model,
    out: str | Path,
    *,
    conversations: int | None = None,
    prompts: Sequence[str] | None = None,
    openings: Sequence[str] | None = None,
    seed: int = 0,
    rows: int = 64,
    part: int = 512,
    **settings: Any,
) -> list[Path]:
    """Writes conversations, or continues a folder of them.

    Each part is a file of its own (``jspec.train.corpus``), on disk before the next
    begins. A conversation depends on the seed and its number only (up to the rounding
    of another batch size), so a folder that was continued equals one written at once.

    Args:
      model: the target, with a chat template.
      out: folder, made if it is missing.
      conversations: how many; None is one a prompt or opening.
      prompts: user's words to answer, again from the first when they run out.
      openings: beginnings of the user's words, which the target finishes; likewise.
        Without either the target writes all of them, and on few topics.
      seed: of everything drawn.
      rows: sequences written at a time.
      part: conversations a file.
      **settings: ``user_cap``, ``answer_cap``, ``temperatures`` and other fields of
        ``Plan``.

    Returns:
      The files, for ``corpus.read``.

    Raises:
      ValueError: no chat template, counts below 1, a prompt or a whole conversation
        that is too long, or a folder that was begun with other settings.
      FloatingPointError: logits that are not finite.
      OSError: a file cannot be written. Those before it are whole.
      SystemExit: after SIGTERM or Ctrl-C.
    """
    if prompts is not None and openings is not None:
        raise ValueError("give prompts or openings, not both")
    words = prompts if openings is None else openings
    total = len(words or ()) if conversations is None else conversations
    for name, value in {"conversations": total, "rows": rows, "part": part}.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    given = _given(model, words, is_open=openings is not None)
    if given is not None and not given.open:
        settings = {"user_cap": given.tokens.shape[1], **settings}
    job = Job(
        model,
        _plan(model, settings, given),
        given,
        _sampling(model, min(rows, part), seed),
        min(rows, part),
        part,
        Path(out),
    )
    remember(job.out, _about(job, seed))
    return _write_parts(job, total)


def _plan(model: Model, settings: dict, given: Given | None) -> Plan:
    config, form = model.config, template(model.tokenizer)
    if not config.eos_ids:
        raise ValueError(
            f"{model.name} has no end-of-sequence id, so its conversations would never "
            "end; set eos_token_id in its config"
        )
    plan = Plan(form, tuple(config.eos_ids), **settings)
    if min(plan.user_cap, plan.answer_cap, len(plan.temperatures)) < 1:
        raise ValueError(
            f"user_cap {plan.user_cap}, answer_cap {plan.answer_cap}, temperatures "
            f"{plan.temperatures}: caps and number of temperatures must be at least 1"
        )
    if given is not None and given.tokens.shape[1] > plan.user_cap:
        raise ValueError(
            f"a prompt or opening has {given.tokens.shape[1]} tokens, more than user_cap "
            f"{plan.user_cap}; raise user_cap or leave the prompt out"
        )
    longest = len(plan.form.prefix) + plan.width
    if longest > config.max_position:
        raise ValueError(
            f"a conversation may have {longest} tokens, but the context of {model.name} "
            f"ends at {config.max_position}; lower user_cap or answer_cap"
        )
    return plan


def _given(model: Model, words: Sequence[str] | None, *, is_open: bool) -> Given | None:
    if words is None:
        return None
    rows = [user_tokens(model.tokenizer, one) for one in words]
    table = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, ids in zip(table, rows, strict=True):
        row[: len(ids)] = ids
    size = np.array([len(ids) for ids in rows], np.int32)
    return Given(jnp.asarray(table), jnp.asarray(size), is_open)


def _sampling(model: Model, rows: int, seed: int) -> Sampling:
    """Equal keys in all rows: draws are told apart by the conversation's number."""
    return smp.options(rows, vocab_size=model.config.vocab_size, seed=[seed] * rows)


def _about(job: Job, seed: int) -> dict:
    """What must not change between two calls that write one folder."""
    words = hashlib.sha256()
    if job.given is not None:
        words.update(np.asarray(job.given.tokens).tobytes())
        words.update(b"open" * job.given.open)
    return {
        "target": job.model.name,
        "tokenizer": fingerprint(job.model.tokenizer),
        "prompts": words.hexdigest(),
        "seed": seed,
        "part": job.part,
        **job.plan._asdict(),
    }


def _write_parts(job: Job, total: int) -> list[Path]:
    starts = range(0, total, job.part)
    files = [job.out / f"part-{i:05d}.npz" for i in range(len(starts))]
    counts = [min(job.part, total - start) for start in starts]
    there = [_count(file) == n for file, n in zip(files, counts, strict=True)]
    done = sum(n for n, is_there in zip(counts, there, strict=True) if is_there)
    with deferred() as wish, Meter("conversation", done, total) as meter:
        for i, start in enumerate(starts):
            if there[i]:
                continue
            state = _write_part(job, start, counts[i], done, meter, wish)
            if state is not None:
                _store(job, files[i], state, start, counts[i])
                done += counts[i]
            if wish.number is not None:
                leave(wish.number, f"{done} conversations are in {job.out}", meter.say)
    return files


def _write_part(
    job: Job, start: int, count: int, done: int, meter: Meter, wish: Wish
) -> Writing | None:
    """``count`` conversations from number ``start`` on; ``done`` are written before.

    None when a signal came before the last of them had ended.
    """
    model, before = job.model, 0
    state = conversing.begin(
        model.params,
        target=model.target,
        plan=job.plan,
        rows=job.rows,
        part=job.part,
        dtype=model.cache_dtype,
    )
    while True:
        state = conversing.advance(
            model.params,
            state,
            job.sampling,
            job.given,
            jnp.int32(start),
            jnp.int32(count),
            jnp.int32(_BURST),
            target=model.target,
            plan=job.plan,
        )
        sizes = np.asarray(state.sizes)[:count]
        if not state.finite:
            raise FloatingPointError(
                f"the logits of {model.name} are not finite; check the weights, or use "
                "a wider dtype"
            )
        written = int(sizes.sum()) + int(np.sum(state.place))
        meter.advance(done + int((sizes > 0).sum()), written - before)
        before = written
        if (sizes > 0).all():
            return state
        if wish.number is not None:
            return None


def _store(job: Job, file: Path, state: Writing, start: int, count: int) -> None:
    numbers = jnp.arange(start, start + count)
    warmth = conversing.temperature(job.plan, job.sampling.key[0], numbers)
    tokens, users, sizes = map(np.asarray, (state.tokens, state.users, state.sizes))
    between = len(job.plan.form.turn) - 1
    found = []
    for row in range(count):
        words, size = int(users[row]), int(sizes[row])
        found.append(
            Conversation(
                tokens[row, :words].tolist(),
                tokens[row, words + between : size].tolist(),
                float(warmth[row]),
            )
        )
    write(
        file,
        found,
        form=job.plan.form,
        eos_ids=job.plan.eos_ids,
        cap=job.plan.answer_cap,
        target=job.model.name,
        tokenizer=fingerprint(job.model.tokenizer),
    )


def _count(file: Path) -> int:
    """Conversations in a part; 0 without a file."""
    if not file.exists():
        return 0
    with np.load(file) as stored:
        phase = stored["phase"][:, 0]
    return int(np.sum(np.diff(phase.astype(int)) < 0)) + 1
