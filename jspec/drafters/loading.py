"""From a name, a folder or a model to a drafter with its weights."""

from __future__ import annotations

import json
from pathlib import Path

from jspec.drafters import assistant, dflash, eagle, growth, mtp, peagle
from jspec.drafters.draft import Draft
from jspec.drafters.growth import Grower
from jspec.drafters.heads import Blockwise, Medusa, blockwise, medusa
from jspec.drafters.lookahead import jacobi, lookahead
from jspec.drafters.ngram import ngram
from jspec.drafters.ngram_tree import ngram_tree
from jspec.drafters.published_assistant import Assistant
from jspec.drafters.published_dflash import BlockHead
from jspec.drafters.published_eagle import Head
from jspec.drafters.published_mtp import Modules, load_mtp
from jspec.drafters.reading import reader
from jspec.drafters.small_model import small_model
from jspec.drafters.suffix import suffix
from jspec.models import Model, load
from jspec.models.load import fetch
from jspec.tree import Topology

HEADS = Path(__file__).parents[2] / "checkpoints"  # of the repository
# Drafters that need neither weights nor a target.
PLAIN = {
    "ngram": ngram,
    "ngram-tree": ngram_tree,
    "suffix": suffix,
    "lookahead": lookahead,
    "jacobi": jacobi,
}


def load_drafter(name: str | Path | Model, target: Model, **options) -> Draft:
    """A drafter for ``target``.

    Args:
      name: one of ``PLAIN``, such as ``"ngram"``; ``"eagle3"`` or another head that
        ``HEADS`` holds for this target; a folder or Hub id of an EAGLE head, a DFlash
        or DSpark drafter, Medusa or blockwise heads, a prediction module or a Gemma 4
        assistant; the target's own folder, if that holds prediction modules; a loaded
        ``Model``; or whatever ``jspec.load`` takes (an alias, a folder, a file, a Hub id), which is
        then an independent small model.
      target: the model it will draft for.
      **options: passed to the drafter: ``gamma`` for all but trees; for one of ``PLAIN``
        its own arguments; for heads ``grower`` (see ``jspec.drafters.growth``),
        without which, or ``gamma``, they grow a dynamic tree, and prediction modules a
        chain of 3; ``grower`` may be a ``Topology`` too. For DFlash and DSpark ``rows``,
        ``least`` and ``dense`` of ``dflash.drafter``.

    Raises:
      ValueError: a draft model with another tokenizer, a head for another target;
        options out of range.
      TypeError: an option that the drafter does not have.
    """
    if isinstance(name, str) and name in PLAIN:
        return Draft(PLAIN[name](**options), name=name)
    if isinstance(name, (str, Path)):
        folder = shipped(str(name), target) or fetch(str(name), pickled=True)
        config = _config(folder)
        read = reader(config)
        # A target's checkpoint may hold modules, and is a small model for other targets.
        if read is load_mtp and "speculators_model_type" not in config:
            read = read if _is_own(folder, target) else None
        if read is not None:
            head = read(folder, target)
            if isinstance(head, BlockHead):
                return block_draft(head, folder.name, target, **options)
            return _draft(head, folder.name, target, **options)
    model = name if isinstance(name, Model) else load(name, dtype=target.dtype)
    check_same_tokens(model, target)
    size = target.target.config.vocab_size
    drafter = small_model(model.target, size, dtype=model.cache_dtype, **options)
    return Draft(drafter, model.params, model.name, size)


def shipped(name: str, target: Model) -> Path | None:
    """The folder of ``HEADS`` with the head ``name`` of this target, if there is one."""
    folder = HEADS / f"{name}-{target.name}"
    plain = "/" not in name + target.name and not Path(name).exists()
    return folder if plain and folder.is_dir() else None


def _config(folder: Path) -> dict:
    file = folder / "config.json"
    try:
        return json.loads(file.read_text()) if file.is_file() else {}
    except ValueError:
        return {}  # for the loader of models to complain about


def _is_own(folder: Path, target: Model) -> bool:
    """Is this the folder that the target was loaded from?"""
    return folder.resolve() == Path(target.name).expanduser().resolve()


def block_draft(head: BlockHead, name: str, target: Model, **options) -> Draft:
    """The drafter of a block-diffusion head; options as of ``dflash.drafter``.

    A block whose tokens are chosen in turn is computed whole unless ``rows`` says
    otherwise: all rows were trained with all others beside them.
    """
    if head.design.link is not None:
        options.setdefault("rows", head.design.block)
    drafter = dflash.drafter(head.design, dtype=target.cache_dtype, **options)
    return Draft(drafter, head.weights, name, target.config.vocab_size)


def _draft(
    head: Head | Modules | Medusa | Blockwise | Assistant,
    name: str,
    target: Model,
    gamma: int | None = None,
    grower: Grower | Topology | None = None,
) -> Draft:
    """The drafter of a head."""
    size, dtype = target.config.vocab_size, target.cache_dtype
    if isinstance(head, Medusa):
        tree = grower or _grower(gamma, len(head.heads))
        return Draft(medusa(head, size, tree), head, name, size)
    if isinstance(head, Blockwise):
        tree = grower or _grower(gamma, len(head.down))
        return Draft(blockwise(head, size, tree), head, name, size)
    if isinstance(grower, Topology):
        grower = growth.ranked(grower)
    if isinstance(head, Assistant):
        _chains_only(name, "an assistant", grower)
        drafter = assistant.drafter(head.design, 4 if gamma is None else gamma)
        return Draft(drafter, head.weights, name, size)
    if isinstance(head, Head) and head.design.mask_id is not None:
        _chains_only(name, "a P-EAGLE head", grower)
        drafter = peagle.drafter(
            head.design, 4 if gamma is None else gamma, dtype=dtype
        )
        return Draft(drafter, head.weights, name, size)
    if isinstance(head, Head):
        grower = grower or _grower(gamma)
        drafter = eagle.drafter(head.design, grower, dtype=dtype)
        return Draft(drafter, head.weights, name, size)
    grower = grower or growth.chain(3 if gamma is None else gamma)
    drafter = mtp.drafter(head.design, grower, len(head.weights), dtype=dtype)
    return Draft(drafter, head.params, f"mtp-{name}", size)


def _chains_only(name: str, kind: str, grower: Grower | None) -> None:
    if grower is not None:
        raise ValueError(f"{name} is {kind}, which drafts chains; use gamma")


def _grower(gamma: int | None, deepest: int = 5) -> Grower:
    """A chain, or a small tree: on a CPU the cost of a block grows with every node."""
    if gamma is not None:
        return growth.chain(gamma)
    return growth.dynamic(nodes=10, depth=min(deepest, 5), width=4)


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
