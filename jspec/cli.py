"""The command line: ``jspec generate``, ``bench``, ``serve``, ``selfgen``, ``train``,
``store``, ``predict``, ``inspect`` and ``export``.

Text goes to standard output, everything said about it to standard error. A mistake of
the user is one line and status 2; Ctrl-C is status 130.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from jspec import bench, cli_heads, cli_predict, cli_serve, cli_store, cli_train
from jspec.arguments import add_target
from jspec.compilation import enable_cache
from jspec.generation import stream
from jspec.models import load

GENERATE = """Continues a prompt and streams the text.

  jspec generate "Why is the sky blue?"
  jspec generate "Why is the sky blue?" --draft none --temperature 0.8 --seed 3
"""

BENCH = """Compares drafters with plain decoding on the same prompts.

  jspec bench --methods ngram --limit 6 --max-new-tokens 64
  jspec bench --methods none,ngram --json results.jsonl
  jspec bench --cost-table costs.json --batch 8 --gamma 7
"""


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; ``args.run`` is the chosen one's function."""
    top = argparse.ArgumentParser(
        prog="jspec", description="Speculative decoding in JAX."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (add, description, summary) in COMMANDS.items():
        add(
            commands.add_parser(
                name,
                help=summary,
                description=description,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    args = parser().parse_args(argv)
    with bench.one_line_errors() as status:
        enable_cache()
        args.run(args)
    if status.code == 130:
        _say("interrupted")
    return status.code


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


# --- generate -------------------------------------------------------------------------


def _add_generate(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=_generate)
    add = command.add_argument
    add("prompt", metavar="PROMPT", help="the text; - reads standard input")
    add_target(command)
    add(
        "--draft",
        default="ngram",
        metavar="DRAFTER",
        help="ngram, suffix, .. as for jspec bench, none, a folder with a head, or a "
        "model as for --target (ngram)",
    )
    add("--gamma", type=int, metavar="N", help="tokens drafted a round")
    add(
        "--rule",
        choices=sorted(bench.RULES),
        help="accept rule; the best exact one unless given (typical is lossy)",
    )
    add("--max-new-tokens", type=int, default=256, metavar="N", help="at most (256)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (0)")
    add("--top-k", type=int, metavar="K", help="sample from the K best tokens")
    add("--top-p", type=float, metavar="P", help="sample from the best P of the mass")
    add("--min-p", type=float, metavar="P", help="least share of the best probability")
    add("--repetition-penalty", type=float, metavar="X", help="above 1 avoids repeats")
    add("--presence-penalty", type=float, metavar="X", help="for tokens of the output")
    add("--frequency-penalty", type=float, metavar="X", help="a time they occur there")
    add("--min-new-tokens", type=int, metavar="N", help="no end before so many")
    add("--seed", type=int, default=0, help="of sampling (0)")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given several times",
    )
    add(
        "--no-chat",
        action="store_true",
        help="take the prompt as it is, without the model's chat template",
    )


_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_new_tokens",
    "seed",
)


def _generate(args: argparse.Namespace) -> None:
    started = time.perf_counter()
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    _say(f"loading {args.target} ...")
    model = load(args.target, dtype=args.dtype)
    method = bench.method(args.draft, model, args.rule, args.gamma)
    deltas = stream(
        model,
        method.draft,
        prompt,
        rule=method.rule,
        max_new_tokens=args.max_new_tokens,
        stop=args.stop,
        chat=False if args.no_chat else None,
        **{name: getattr(args, name) for name in _SAMPLING},
    )
    _say("compiling (first run only) ...")
    seen: list[float] = []  # seconds after the start, one a round
    early = 0
    for delta in deltas:
        seen.append(time.perf_counter() - started)
        early = early or len(delta.tokens)
        print(delta.text, end="", flush=True)
    print(flush=True)
    counts, reason = deltas.output.stats, deltas.output.finish_reason[0]
    # From the first round on: whatever had to be compiled came before its end.
    rate = (counts.new_tokens - early) / max(seen[-1] - seen[0], 1e-9)
    _say(
        f"tau {counts.tau:.2f} (tokens a target forward, bonus included), "
        f"{rate:.1f} tokens/s, {counts.new_tokens} tokens in {counts.rounds} rounds, "
        f"finished by {reason}; first token after {seen[0]:.1f} s"
    )


# --- bench ----------------------------------------------------------------------------


def _add_bench(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=_bench)
    bench.add_arguments(command)
    command.add_argument(
        "--methods",
        metavar="NAME,NAME",
        help="several drafters, each a value of --drafter, one after the other",
    )
    command.add_argument(
        "--gamma", type=int, metavar="N", help="tokens drafted a round"
    )
    command.add_argument(
        "--cost-table",
        metavar="FILE",
        help="instead measure what a forward of --batch sequences costs over blocks of 1 "
        "to gamma + 1 tokens, and write it for the scheduler",
    )


def _bench(args: argparse.Namespace) -> None:
    if args.cost_table:
        return cli_serve.write_cost_table(args)
    names = [name.strip() for name in (args.methods or args.drafter).split(",")]

    def methods(model, args):
        return [bench.method(name, model, args.rule, args.gamma) for name in names]

    bench.from_arguments(args, methods)


COMMANDS = {
    "generate": (_add_generate, GENERATE, "continue a prompt"),
    "bench": (_add_bench, BENCH, "compare drafters with plain decoding"),
    "serve": (cli_serve.add_serve, cli_serve.SERVE, "answer over HTTP"),
    "selfgen": (cli_train.add_selfgen, cli_train.SELFGEN, "write a corpus"),
    "train": (cli_train.add_train, cli_train.TRAIN, "train a head"),
    "store": (cli_store.add_store, cli_store.STORE, "texts to copy drafts from"),
    "predict": (cli_predict.add_predict, cli_predict.PREDICT, "rounds on another chip"),
    "inspect": (cli_heads.add_inspect, cli_heads.INSPECT, "look at a published head"),
    "export": (cli_heads.add_export, cli_heads.EXPORT, "write a head for others"),
}
