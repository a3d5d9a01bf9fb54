"""Every method in one table: same target, same prompts, same machine, one after the other.

Each is run against plain decoding of the same prompts, in turn, and its text is compared
with that. With --json what is finished is on disk, and a second start goes on from there;
--plots draws speed-up by task, tau against cost, and acceptance by depth. --smoke runs one
method of every kind on two prompts.

    python experiments/compare.py --limit 12 --json results.jsonl --plots figures
    python experiments/compare.py --only "ngram 3" "ngram 7" --gamma 3 7
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jspec import bench, comparison, drafters, record, report, tree
from jspec.comparison import Entry
from jspec.compilation import enable_cache
from jspec.drafters import Draft, load_drafter, store
from jspec.models import Model, load
from jspec.prompts import load_prompts
from jspec.record import Settings
from jspec.tree_options import HEADS
from jspec.types import Drafter

# For a small machine: few nodes, and cheap rounds where nothing is found.
RECYCLED = tree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]])


# What --smoke runs: every kind of block, state and params.
SMOKE = ("prompt lookup", "suffix decoding", "Lookahead", "trained head", "both")


def copied(
    name: str, family: str, make: Callable[..., Drafter], *args, **more
) -> Entry:
    """A drafter without weights."""
    return Entry(name, family, lambda model: Draft(make(*args, **more), name=name))


def entries(args: argparse.Namespace) -> list[Entry]:
    """All methods that there are, the heads in --heads included."""
    tree_of = drafters.suffix_tree
    made = [
        copied("ngram tree", "n-gram trie", drafters.ngram_tree),
        copied("suffix tree", "suffix decoding", drafters.suffix, 8, 12, tree_of),
        copied("lookahead", "Lookahead", drafters.lookahead, 5, 4, 5),
        Entry("recycling", "Token Recycling", _recycling),
    ]
    for n in args.gamma:
        made += [
            copied(f"ngram {n}", "prompt lookup", drafters.ngram, n),
            copied(f"suffix {n}", "suffix decoding", drafters.suffix, n),
            copied(f"jacobi {n}", "Jacobi", drafters.jacobi, n),
            Entry(f"first layers {n}", "early exit", functools.partial(_layers, n)),
        ]
    folders = Path(args.heads).glob("*/config.json")
    for folder in sorted(file.parent for file in folders):
        name, head = folder.name, functools.partial(_head, folder)
        made.append(Entry(name, "trained head", head))
        made.append(Entry(f"suffix, else {name}", "both", functools.partial(_or, head)))
    if args.store:
        made.append(Entry("rest", "datastore", functools.partial(_rest, args.store)))
    return made


def _layers(gamma: int, model: Model) -> Draft:
    return drafters.self_model(model, max(1, model.config.layers // 10), gamma)


def _or(head: Callable[[Model], Draft], model: Model) -> Draft:
    return drafters.by_score(Draft(drafters.suffix(8), name="suffix"), head(model))


def _recycling(model: Model) -> Draft:
    drafter = drafters.recycling(model.config.vocab_size, RECYCLED)
    return Draft(drafter, name="recycling")


def _head(folder: Path, model: Model) -> Draft:
    return load_drafter(folder, model)


def _rest(folder: str, model: Model) -> Draft:
    texts = store.load(folder)
    store.check_ids(texts, model.config.vocab_size)
    size = model.config.vocab_size
    return Draft(drafters.rest(), texts.on_device(), "rest", size)


def chosen(args: argparse.Namespace) -> list[Entry]:
    """The methods asked for: by --only, by --smoke one of every kind, else all.

    Raises:
      ValueError: one of them does not exist.
    """
    every = entries(args)
    names = [e.name for e in every]
    unknown = [name for name in args.only or () if name not in names]
    if unknown:
        raise ValueError(f"there is no method {unknown[0]!r}; there are: {names}")
    if args.only:
        return [e for e in every if e.name in args.only]
    if args.smoke:
        first = {e.family: e for e in reversed(every)}
        return [first[family] for family in SMOKE if family in first]
    return every


def compare(args: argparse.Namespace) -> list[dict]:
    """Runs what is not finished yet; returns the records of all."""
    every = chosen(args)
    questions = load_prompts(args.prompts, args.limit)
    model = load(args.target, dtype=args.dtype)
    settings = Settings(**{name: getattr(args, name) for name in Settings._fields})
    say = report.console(error=True).print
    names = {e.name for e in every}
    done = [
        r
        for r in comparison.finished(args.json, settings, model.name, len(questions))
        if r["method"] in names or r["family"] == "other library"
    ]
    if done:
        say(f"already in {args.json}: {', '.join(r['method'] for r in done)}")
    with record.lines(args.json) as file:
        for entry in every:
            if entry.name in {r["method"] for r in done}:
                continue
            method = bench.Method(
                entry.name, entry.make(model), bench.RULES.get(args.rule)
            )
            more = functools.partial(
                comparison.facts,
                model,
                entry,
                settings=settings,
                prompts=len(questions),
            )
            # The lines are written here, with the fields that only a comparison has.
            plain = settings._replace(json=None)
            done += bench.run(model, [method], questions, plain, more)
            record.append(file, done[-1])
    report.console().print(comparison.table(done))
    if args.plots:
        for path in comparison.plots(done, args.plots):
            say(f"drew {path}")
    return done


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.argument_parser(__doc__)
    add = parser.add_argument
    add(
        "--gamma",
        type=int,
        nargs="+",
        default=[7],
        metavar="N",
        help="drafts of chains without training; a method for each (7)",
    )
    add("--only", nargs="+", metavar="NAME", help="these methods; all unless given")
    add("--heads", default=str(HEADS), metavar="FOLDER", help="folder of trained heads")
    add("--store", metavar="FOLDER", help="a store for REST, from jspec store")
    add("--plots", metavar="FOLDER", help="draw three figures into this folder")
    args = parser.parse_args(argv)
    if args.smoke:
        args.limit = min(args.limit or 2, 2)
        args.max_new_tokens = min(args.max_new_tokens, 16)
    with bench.one_line_errors() as status:
        enable_cache()
        compare(args)
    return status.code


if __name__ == "__main__":
    sys.exit(main())
