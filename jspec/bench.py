"""The contract of every experiment: options, a fair run, a table, a line of JSON.

A method is a drafter with an accept rule. It is run on the same prompts as plain
decoding, prompt batch by prompt batch in turn, so that both see the same machine; then
the terms of a round are measured (``jspec.measure``). Compiling is never timed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from rich.progress import Progress

from jspec import record, report, text, trial, verify
from jspec.arguments import add_target
from jspec.compilation import enable_cache
from jspec.drafters import load_drafter
from jspec.drafters.loading import PLAIN
from jspec.models import Model, load
from jspec.prompts import Question, load_prompts
from jspec.record import Method, Settings
from jspec.types import Rule

_SLOTS = 64  # the context shared by all prompts is a multiple of this
_SMOKE = {"limit": 3, "max_new_tokens": 16}

RULES: dict[str, Rule] = {**verify.LOSSLESS, "typical": verify.lossy.typical()}


def argument_parser(
    description: str | None, defaults: Mapping[str, Any] | None = None
) -> argparse.ArgumentParser:
    """The options that all experiments share.

    Args:
      description: shown by ``--help``.
      defaults: option names (with underscores) and other values for them.
    """
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(**(defaults or {}))
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the shared options to a parser."""
    add = parser.add_argument
    add_target(parser)
    add(
        "--drafter",
        default="ngram",
        help=f"{', '.join(PLAIN)}, none, a folder with a head, or a model as for "
        "--target, which drafts as a small model",
    )
    add(
        "--rule",
        choices=sorted(RULES),
        help="accept rule; the best exact one unless given (typical is lossy)",
    )
    add(
        "--prompts",
        metavar="FILE",
        help="JSON lines with question_id, category and turns, of which the first is "
        "used; by default the set that comes with jspec",
    )
    add(
        "--limit",
        type=int,
        metavar="N",
        help="use N prompts, taken from the categories in turn; all unless given",
    )
    add("--max-new-tokens", type=int, default=64, metavar="N", help="per prompt (64)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (0)")
    add("--seed", type=int, default=0, help="of sampling (0)")
    add(
        "--batch", type=int, default=1, metavar="B", help="prompts decoded together (1)"
    )
    add(
        "--json", metavar="FILE", help="append one line a method, as soon as it is done"
    )
    add(
        "--smoke",
        action="store_true",
        help="three prompts, 16 tokens, short measurements: does everything run?",
    )


def main(
    parser: argparse.ArgumentParser,
    methods: Callable[[Model, argparse.Namespace], Sequence[Method]],
    argv: Sequence[str] | None = None,
) -> int:
    """Runs an experiment from its command line; returns the exit status.

    Args:
      parser: from ``argument_parser``, with options of its own if need be.
      methods: makes the methods from the target and the options.
      argv: arguments, by default those of the process.
    """
    args = parser.parse_args(argv)
    with one_line_errors() as status:
        enable_cache()
        from_arguments(args, methods)
    return status.code


def from_arguments(args: argparse.Namespace, methods: Callable) -> list[dict]:
    """``run`` with the options of ``add_arguments``."""
    if args.smoke:
        args.limit = min(args.limit or _SMOKE["limit"], _SMOKE["limit"])
        args.max_new_tokens = min(args.max_new_tokens, _SMOKE["max_new_tokens"])
    questions = load_prompts(args.prompts, args.limit)
    model = load(args.target, dtype=args.dtype)
    settings = Settings(**{name: getattr(args, name) for name in Settings._fields})
    return run(model, methods(model, args), questions, settings)


def method(
    name: str, model: Model, rule: str | None = None, gamma: int | None = None
) -> Method:
    """A method from the values of ``--drafter``, ``--rule`` and a draft length."""
    if name == "none":
        return Method("none", None)
    options = {} if gamma is None else {"gamma": gamma}
    draft = load_drafter(name, model, **options)
    depth = draft.drafter.shape.depth
    return Method(f"{name} gamma {depth}", draft, RULES[rule] if rule else None)


class Status:
    """Exit status of a command: 0, or what ``one_line_errors`` made of an exception."""

    code = 0


@contextlib.contextmanager
def one_line_errors() -> Iterator[Status]:
    """Turns exceptions into one line and a status.

    Mistakes of the user are 2, logits that are not finite 1, Ctrl-C 130; a reader of
    standard output that went away is 141, without a word, as if by its signal.
    """
    status = Status()
    try:
        yield status
        sys.stdout.flush()
    except KeyboardInterrupt:
        status.code = 130
    except BrokenPipeError:
        # What is still buffered would fail again when the interpreter exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status.code = 141
    except (ValueError, TypeError, OSError, ImportError, FloatingPointError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"error: {message}", file=sys.stderr)
        status.code = 1 if isinstance(error, FloatingPointError) else 2


# --- running --------------------------------------------------------------------------


def run(
    model: Model,
    methods: Sequence[Method],
    questions: Sequence[Question],
    settings: Settings | None = None,
    more: Callable[[Method, Sequence[trial.Pair]], dict] = lambda method, pairs: {},
) -> list[dict]:
    """Runs every method against plain decoding, prints tables, appends JSON lines.

    Each line is on disk before the next method begins; Ctrl-C prints what is finished
    and is raised again.

    Args:
      model, methods, questions, settings: what is run, and how.
      more: further fields for a method's line.

    Returns:
      One record a method, with the fields of its JSON line.

    Raises:
      ValueError: no prompt fits the model's context, or bad settings.
      OSError: the JSON file cannot be written.
    """
    settings = settings or Settings()
    out, messages = report.console(), report.console(error=True)
    prompts = _encoded(model, questions, settings.max_new_tokens, messages.print)
    given = trial.batches(prompts, settings.batch)
    slots = _slots(model, prompts, settings.max_new_tokens)
    records: list[dict] = []
    with record.lines(settings.json) as file:
        for one in methods:
            pairs: list[trial.Pair] = []
            title = f"{one.name} on {model.name} in {jnp.dtype(model.dtype).name}"
            title += f", temperature {settings.temperature:g}"
            try:
                _duel(model, one, given, slots, settings, pairs)
                done = record.record(model, one, pairs, slots, settings)
                done |= more(one, pairs)
            except KeyboardInterrupt:
                messages.print(f"interrupted; {len(records)} methods are finished")
                if pairs:
                    out.print(report.categories(f"{title} (unfinished)", pairs))
                if records:
                    out.print(report.methods(records))
                raise
            records.append(done)
            record.append(file, done)
            out.print(report.categories(title, pairs))
            _warn(one, pairs, done, messages.print)
    out.print(report.methods(records))
    return records


def _encoded(model: Model, questions, new: int, say: Callable) -> list:
    """``(category, ids)`` of the prompts that fit the context with their new tokens."""
    if not questions:
        raise ValueError("no prompts; give at least one")
    prompts = [q.prompt for q in questions]
    size, room = model.config.vocab_size, model.config.max_position
    encoded = text.encode(model.tokenizer, prompts, size)
    fitting = []
    for question, ids in zip(questions, encoded, strict=True):
        if len(ids) + new <= room:
            fitting.append((question.category, ids))
        else:
            say(
                f"skipped question {question.id}: its {len(ids)} tokens and {new} new "
                f"ones exceed the context of {room}"
            )
    if not fitting:
        raise ValueError(f"no prompt fits the context of {room} tokens")
    return fitting


def _slots(model: Model, prompts, new: int) -> int:
    """One context size for all prompts, so that they share a program."""
    needed = max(len(ids) for _, ids in prompts) + new
    return min(-(-needed // _SLOTS) * _SLOTS, model.config.max_position)


def _duel(model, one: Method, given, slots, settings: Settings, pairs: list) -> None:
    """Fills ``pairs``; they outlive an interruption."""
    screen = report.console(error=True)
    with Progress(console=screen, transient=True, refresh_per_second=2) as progress:
        bar = progress.add_task(f"{one.name}: compiling", total=len(given))
        for pair in trial.duel(
            model,
            one.draft,
            one.rule,
            given,
            slots=slots,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            seed=settings.seed,
        ):
            pairs.append(pair)
            progress.update(bar, advance=1, description=one.name)
        progress.update(bar, description=f"{one.name}: measuring")


def _warn(one: Method, pairs: Sequence[trial.Pair], done: dict, say: Callable) -> None:
    ours = trial.summarise(pairs).ours
    if not done["lossless"]:
        say(
            f"WARNING: {one.name} does not keep the target's text or law{_rounded(done)}"
        )
    elif done["temperature"] and done["first_divergence"] is not None:
        say(
            f"WARNING: with {one.name} a sample differs from plain sampling from token "
            f"{done['first_divergence']} on, though the coupled rule should keep it"
        )
    if one.draft is None:
        return
    if not ours.proposed:
        say(f"WARNING: {one.name} never drafted anything; this is plain decoding")
    elif not ours.accepted:
        say(f"WARNING: no draft of {one.name} was ever accepted")


def _rounded(done: dict) -> str:
    """What else may have parted two texts than a fault."""
    if done["dtype"] == "float32" or done["max_logit_gap"] is None:
        return ""
    gap = f"logits up to {done['max_logit_gap']:.2g} apart"
    return f" ({gap}: see whether float32 does; {done['dtype']} rounds by block width)"
