"""Spec-Bench: six tasks, two-turn chats, its answer files and its metrics.

--prompts is Spec-Bench's question.jsonl. One answer file a method goes to --answers, in the
form its own scripts read; the table shows its speed-up beside the corrected one.

    python experiments/spec_bench.py --prompts question.jsonl --answers answers --limit 12
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from jspec import bench, report, spec_bench
from jspec.compilation import enable_cache
from jspec.drafters import Draft
from jspec.models import Model, load


def answers(model: Model, draft: Draft | None, name: str, asked, args) -> list[dict]:
    """The lines of one method, also written to its file."""
    options = dict(max_new_tokens=args.max_new_tokens, slots=args.slots, seed=args.seed)
    folder = Path(args.answers)
    folder.mkdir(parents=True, exist_ok=True)
    for _ in range(spec_bench.WARM_UPS):
        spec_bench.answer(model, draft, asked[0], name, **options)
    lines = []
    with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
        for question in asked:
            line = spec_bench.answer(model, draft, question, name, **options)
            if line is None:
                continue
            lines.append(line)
            file.write(json.dumps(line) + "\n")
            file.flush()
    return lines


def table(name: str, scores: dict[str, spec_bench.Score]) -> Table:
    out = Table(title=f"{name} on Spec-Bench", caption="accepted: bonus included")
    for column in ("task", "published speed-up", "corrected", "accepted", "same text"):
        out.add_column(column, justify="left" if column == "task" else "right")
    for task, score in scores.items():
        out.add_row(
            task,
            f"{score.published:.2f}x",
            f"{score.corrected:.2f}x",
            f"{score.accepted:.2f}",
            "yes" if score.same else "NO",
        )
    return out


def run(args) -> dict[str, dict[str, spec_bench.Score]]:
    """Scores of every drafter in --drafter, which may be several, by commas."""
    if args.prompts is None:
        raise ValueError("--prompts must name Spec-Bench's question.jsonl")
    if args.temperature != 0 or args.batch != 1:
        raise ValueError("the protocol is greedy and one question at a time")
    asked = spec_bench.read(args.prompts, args.limit)
    model = load(args.target, dtype=args.dtype)
    if model.tokenizer is None or model.tokenizer.chat_template is None:
        raise ValueError(
            f"{model.name} has no chat template, and the questions are chats"
        )
    args.slots = min(args.slots, model.config.max_position)
    plain = answers(model, None, "vanilla", asked, args)

    def count(text: str) -> int:
        return len(model.tokenizer(text)["input_ids"])

    found = {}
    for name in args.drafter.split(","):
        method = bench.method(name.strip(), model)
        assert method.draft is not None
        short = Path(method.draft.name).name
        ours = answers(model, method.draft, short, asked, args)
        found[short] = spec_bench.scores(ours, plain, count)
        report.console().print(table(short, found[short]))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.argument_parser(__doc__)
    parser.add_argument("--answers", default="answers", metavar="FOLDER")
    parser.add_argument(
        "--slots",
        type=int,
        default=2048,
        metavar="N",
        help="context; questions that do not fit are left out (2048)",
    )
    args = parser.parse_args(argv)
    if args.smoke:
        args.limit, args.max_new_tokens = 2, min(args.max_new_tokens, 16)
    with bench.one_line_errors() as status:
        enable_cache()
        run(args)
    return status.code


if __name__ == "__main__":
    sys.exit(main())
