"""From a name, a folder or a model to a drafter with its weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from jspec.drafters import eagle, growth, mtp
from jspec.drafters.draft import Draft
from jspec.drafters.growth import Grower
from jspec.drafters.heads import Blockwise, Medusa, blockwise, medusa
from jspec.drafters.ngram import ngram
from jspec.drafters.published_eagle import is_eagle, load_eagle
from jspec.drafters.published_medusa import is_medusa, read_medusa
from jspec.drafters.published_mtp import is_mtp, load_mtp
from jspec.drafters.small_model import small_model
from jspec.drafters.stored_blockwise import is_blockwise, read_blockwise
from jspec.models import Model, load
from jspec.models.load import fetch
from jspec.tree import Topology
from jspec.types import Drafter


def load_drafter(name: str | Path | Model, target: Model, **options) -> Draft:
    """A drafter for ``target``.

    Args:
      name: ``"ngram"``; a folder or Hub id of an EAGLE head, Medusa or blockwise heads
        or a prediction module; the target's own folder, if that holds prediction modules; a loaded
        ``Model``; or whatever ``jspec.load`` takes (an alias, a folder, a file, a Hub
        id), which is then used as an independent small model.
      target: the model it will draft for.
      **options: passed to the drafter: ``gamma`` for all; ``longest``, ``shortest`` and
        ``pick`` for ``ngram``; for heads ``grower`` (see ``jspec.drafters.growth``),
        without which, or ``gamma``, they grow a dynamic tree, and prediction modules a
        chain of 3. ``grower`` of Medusa and blockwise heads may be a ``Topology``.

    Raises:
      ValueError: a draft model with another tokenizer, a head for another target;
        options out of range.
      TypeError: an option that the drafter does not have.
    """
    if name == "ngram":
        return Draft(ngram(**options), name="ngram")
    if isinstance(name, (str, Path)):
        folder = fetch(str(name), pickled=True)
        config = _config(folder)
        if is_eagle(config):
            return _load_head(folder, target, **options)
        if is_medusa(config):
            heads = read_medusa(folder, target)
            count = len(heads.heads)
            return _load_heads(heads, count, medusa, folder.name, target, **options)
        if is_blockwise(config):
            heads = read_blockwise(folder, target)
            count = len(heads.down)
            return _load_heads(heads, count, blockwise, folder.name, target, **options)
        if is_mtp(config) and (
            "speculators_model_type" in config or _is_own(folder, target)
        ):
            return _load_modules(folder, target, **options)
    model = name if isinstance(name, Model) else load(name, dtype=target.dtype)
    check_same_tokens(model, target)
    size = target.target.config.vocab_size
    drafter = small_model(model.target, size, dtype=model.dtype, **options)
    return Draft(drafter, model.params, model.name, size)


def _dynamic(depth: int = 5) -> Grower:
    """A small tree: on a CPU the cost of a block grows with every node."""
    return growth.dynamic(nodes=10, depth=depth, width=4)


def _config(folder: Path) -> dict:
    file = folder / "config.json"
    try:
        return json.loads(file.read_text()) if file.is_file() else {}
    except ValueError:
        return {}  # for the loader of models to complain about


def _is_own(folder: Path, target: Model) -> bool:
    """Is this the folder that the target was loaded from?"""
    return folder.resolve() == Path(target.name).expanduser().resolve()


def _load_head(
    folder: Path,
    target: Model,
    gamma: int | None = None,
    grower: Grower | None = None,
) -> Draft:
    head = load_eagle(folder, target)
    if grower is None:
        grower = _dynamic() if gamma is None else growth.chain(gamma)
    drafter = eagle.drafter(head.design, grower, dtype=target.dtype)
    return Draft(drafter, head.weights, folder.name, target.config.vocab_size)


def _load_heads(
    weights: Medusa | Blockwise,
    count: int,
    make: Callable[..., Drafter],
    name: str,
    target: Model,
    gamma: int | None = None,
    grower: Grower | Topology | None = None,
) -> Draft:
    """``count`` heads that read the target's last hidden state."""
    size = target.config.vocab_size
    if grower is None:
        tree = _dynamic(min(count, 5))
        grower = tree if gamma is None else growth.chain(gamma)
    return Draft(make(weights, size, grower), weights, name, size)


def _load_modules(
    folder: Path, target: Model, gamma: int = 3, grower: Grower | None = None
) -> Draft:
    modules = load_mtp(folder, target)
    drafter = mtp.drafter(
        modules.design,
        growth.chain(gamma) if grower is None else grower,
        len(modules.weights),
        dtype=target.dtype,
    )
    return Draft(
        drafter, modules.params, f"mtp-{folder.name}", target.config.vocab_size
    )


def check_same_tokens(draft: Model, target: Model) -> None:
    """Refuses a draft model whose ids mean other tokens than the target's.

    Padded vocabulary rows may differ; the tokens may not.

    Raises:
      ValueError: naming both models and the first id that differs.
    """
    if draft.tokenizer is None or target.tokenizer is None:
        small, large = draft.target.config.vocab_size, target.target.config.vocab_size
        if small != large:
            raise ValueError(
                f"{draft.name} has a vocabulary of {small}, {target.name} of {large}, "
                "and without tokenizers there is no telling whether ids agree"
            )
        return
    ours, theirs = (_tokens_by_id(m.tokenizer) for m in (draft, target))
    differing = [i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i)]
    if differing:
        i = min(differing)
        raise ValueError(
            f"{draft.name} cannot draft for {target.name}: id {i} is {ours.get(i)!r} in "
            f"the first and {theirs.get(i)!r} in the second, and {len(differing) - 1} "
            "more ids differ; choose a draft model with the target's tokenizer"
        )


def _tokens_by_id(tokenizer) -> dict[int, str]:
    return {i: token for token, i in tokenizer.get_vocab().items()}
