"""``jspec generate`` and ``jspec bench``; ``python -m jspec`` is the same.

Text goes to standard output, everything else to standard error, so that the output can
be piped. Bad input ends with one line and exit code 2.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

# Names of sampling options that are passed on when given.
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
_USER_ERRORS = (ValueError, TypeError, FileNotFoundError, ImportError, OSError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code (0, 2 on bad input, 130 on Ctrl-C)."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        if argv[:1] == ["bench"]:  # has a parser of its own, shared with experiments
            _bench(argv[1:])
        else:
            args = _parser().parse_args(argv)
            args.run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except FloatingPointError as error:
        print(f"jspec: {error}", file=sys.stderr)
        return 1
    except _USER_ERRORS as error:
        print(f"jspec: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jspec", description="Speculative decoding in JAX."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_generate(commands)
    commands.add_parser(
        "bench", help="compare drafters with plain decoding on real prompts"
    )
    return parser


def _add_generate(commands: Any) -> None:
    p = commands.add_parser(
        "generate",
        help="stream a continuation of a prompt",
        description="Streams a continuation of a prompt, then prints tau and the speed.",
        epilog='example: jspec generate "Name three rivers." --draft ngram',
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("prompt", help="the text; - reads standard input")
    p.add_argument(
        "--target",
        default="smollm2-135m",
        help="alias, folder, .safetensors, .gguf or Hub id",
    )
    p.add_argument(
        "--draft",
        default="ngram",
        help="ngram, none, or a model (as --target) to draft with",
    )
    p.add_argument("--gamma", type=int, help="drafted tokens a round (drafter's own)")
    p.add_argument("--max-new-tokens", type=int, default=256, help="most new tokens")
    p.add_argument("--rule", help="accept rule by name; default: the best exact one")
    p.add_argument("--stop", action="append", default=[], help="stop string (repeat)")
    p.add_argument("--no-chat", action="store_true", help="do not apply the template")
    p.add_argument("--temperature", type=float, help="0 is greedy (0)")
    p.add_argument("--top-k", type=int, help="keep the k best tokens (all)")
    p.add_argument("--top-p", type=float, help="nucleus mass (1)")
    p.add_argument("--min-p", type=float, help="share of the best probability (0)")
    p.add_argument("--repetition-penalty", type=float, help="as transformers' (1)")
    p.add_argument("--presence-penalty", type=float, help="as OpenAI's (0)")
    p.add_argument("--frequency-penalty", type=float, help="as OpenAI's (0)")
    p.add_argument("--min-new-tokens", type=int, help="no end before this many (0)")
    p.add_argument("--seed", type=int, help="of the sampling (0)")
    p.set_defaults(run=_generate)


def _bench(argv: Sequence[str]) -> None:
    from jspec import bench

    bench.main(argv)


def _generate(args: argparse.Namespace) -> None:
    started = time.perf_counter()
    _say("loading ...")
    import jspec
    from jspec.compilation import enable_cache

    enable_cache()
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    model = jspec.load(args.target)
    options = {n: v for n in _SAMPLING if (v := getattr(args, n)) is not None}
    stream = jspec.stream(
        model,
        _draft(args, model),
        prompt,
        max_new_tokens=args.max_new_tokens,
        stop=args.stop,
        rule=_rule(args.rule),
        chat=False if args.no_chat else None,
        **options,
    )
    _say(f"{model.name} with {args.draft}; the first run compiles ...")
    first = None
    for delta in stream:
        first = first or time.perf_counter()
        sys.stdout.write(delta.text)
        sys.stdout.flush()
    print()
    _report(stream.output, (first or started) - started)


def _draft(args: argparse.Namespace, model: Any) -> Any:
    from jspec import load_drafter

    if args.draft == "none":
        return None
    options = {} if args.gamma is None else {"gamma": args.gamma}
    return load_drafter(args.draft, model, **options)


def _rule(name: str | None) -> Callable | None:
    from jspec import verify

    if name is None:
        return None
    if name not in verify.LOSSLESS:
        raise ValueError(f"rule {name!r} is not one of {', '.join(verify.LOSSLESS)}")
    return verify.LOSSLESS[name]


def _report(output: Any, first: float) -> None:
    s = output.stats
    _say(
        f"[{output.finish_reason[0]}] {s.new_tokens} tokens in {s.rounds} target forwards"
        f": tau {s.tau:.2f} (bonus included), {s.tokens_per_s:.1f} tokens/s; first token "
        f"after {first:.1f} s"
    )


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
