"""The published layouts of Medusa heads, read and written.

The authors': a folder with ``config.json`` (``medusa_num_heads``, ``medusa_num_layers``,
``base_model_name_or_path``) and one file of weights: ``{i}.{j}.linear.weight [M, M]`` and
``{i}.{j}.linear.bias [M]`` for the residual block ``j`` of head ``i``,
``{i}.{layers}.weight [V, M]`` for its vocabulary product. The blocks of a head share
their weights, which the file repeats for every ``j``.

vLLM's, which has a place for a draft vocabulary: ``model_type`` "medusa", ``num_heads``,
``num_hidden_layers``, ``truncated_vocab_size`` and ``medusa_fc_bias`` in the config; the
tensors ``blocks.{i}.layers.{j}.weight`` and ``.bias``, ``lm_heads.{i}.weight`` and
``token_map [V']``, the target ids that the rows of the heads stand for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jspec import checks, tree
from jspec.drafters import tensors
from jspec.drafters.draft import Draft
from jspec.drafters.growth import Grower
from jspec.drafters.heads import Medusa, MedusaHead, medusa
from jspec.models import Model
from jspec.tree import Topology

WEIGHTS = "medusa_lm_head.safetensors"
_PICKLED = "medusa_lm_head.pt"


class Layout(NamedTuple):
    """How a folder names tensors: of block ``j`` of head ``i``, and of its product."""

    block: str
    vocab: str

    def blocks(self, head: int, layers: int, part: str) -> list[str]:
        """The same tensor in every residual block of a head, which share it."""
        return [self.block.format(i=head, j=j, part=part) for j in range(layers)]


def authors(layers: int) -> Layout:
    """The names of the original code, whose product stands behind the blocks."""
    return Layout("{i}.{j}.linear.{part}", f"{{i}}.{layers}.weight")


VLLM = Layout("blocks.{i}.layers.{j}.{part}", "lm_heads.{i}.weight")


def is_medusa(config: dict) -> bool:
    """Does a ``config.json`` look like that of Medusa heads?"""
    return "medusa_num_heads" in config or config.get("model_type") == "medusa"


def load_medusa(
    folder: str | Path, target: Model, topology: Topology | Grower = tree.MEDUSA_63
) -> Draft:
    """Medusa heads of a folder in a published layout, ready to draft for ``target``.

    Args:
      folder, target: as for ``read_medusa``.
      topology: as in ``jspec.drafters.medusa``.

    Raises:
      ValueError: a tree that is too deep for the heads; and as ``read_medusa``.
    """
    weights, size = read_medusa(folder, target), target.config.vocab_size
    return Draft(medusa(weights, size, topology), weights, Path(folder).name, size)


def read_medusa(folder: str | Path, target: Model) -> Medusa:
    """Medusa heads of a folder in a published layout.

    In the authors' layout the file says how many heads there are, at least as many as
    the config does: published configs announce two where the file holds five.

    Args:
      folder: with ``config.json`` and ``medusa_lm_head.safetensors``,
        ``model.safetensors`` or, where torch is installed, ``medusa_lm_head.pt``.
      target: the model they were trained on; the heads take its dtype.

    Raises:
      FileNotFoundError: no config or no weights.
      ImportError: a ``.pt`` file without torch.
      ValueError: missing or unexpected tensors; heads of another width or vocabulary
        than the target's; residual blocks of a head that differ.
    """
    folder = Path(folder)
    config = tensors.read_config(folder)
    vllm = config.get("model_type") == "medusa"
    heads, layers = _counts(folder, config, vllm)
    found = tensors.read_tensors(folder, own=WEIGHTS, pickled=_PICKLED)
    if vllm:
        layout = VLLM
        found = {key.removeprefix("medusa_heads."): x for key, x in found.items()}
    else:
        layout = authors(layers)
        heads = max(heads, *(_head_of(key) + 1 for key in found), 1)
    ids = _draft_ids(folder, found, target) if vllm else None
    rows = _rows(folder, found.get(layout.vocab.format(i=0)), ids, target)
    biased = not vllm or config.get("medusa_fc_bias", False)
    shapes = _shapes(layout, heads, layers, (rows, target.config.hidden), biased)
    if ids is not None:
        shapes["token_map"] = ids.shape
    kept = tensors.take(folder, found, shapes)
    _check_shared(folder, kept, layout, heads, layers)
    return Medusa(
        tuple(_head(kept, layout, i, ids, target) for i in range(heads)),
        to_target=None if ids is None else jnp.asarray(ids),
        layers=layers,
    )


def save_medusa(
    weights: Medusa,
    folder: str | Path,
    dtype=None,
    *,
    base: str = "",
    vocab_size: int | None = None,
) -> Path:
    """Writes heads as the authors do, those with a draft vocabulary as vLLM does.

    Args:
      weights: the heads.
      folder: made if it is missing; files of the same names are replaced.
      dtype: of the tensors; that of the heads, if None.
      base: name of the target, for ``base_model_name_or_path``.
      vocab_size: of the target; needed with a draft vocabulary.

    Returns:
      The folder.

    Raises:
      ValueError: a draft vocabulary without ``vocab_size``.
    """
    ids, heads = weights.to_target, weights.heads
    if ids is not None and vocab_size is None:
        raise ValueError("heads with a draft vocabulary are saved with vocab_size")
    layout = authors(weights.layers) if ids is None else VLLM
    arrays = {}
    for i, head in enumerate(heads):
        for part, x in (("weight", head.weight), ("bias", head.bias)):
            arrays |= dict.fromkeys(layout.blocks(i, weights.layers, part), x)
        arrays[layout.vocab.format(i=i)] = head.vocab
    arrays = {key: np.asarray(jnp.asarray(x, dtype)) for key, x in arrays.items()}
    config: dict[str, Any] = {"base_model_name_or_path": base}
    if ids is None:
        config |= {"medusa_num_heads": len(heads), "medusa_num_layers": weights.layers}
        return tensors.write(Path(folder), config, arrays, WEIGHTS)
    arrays["token_map"] = np.asarray(ids, np.int64)
    return tensors.write(
        Path(folder), config | _vllm_config(weights, vocab_size), arrays
    )


def _vllm_config(weights: Medusa, vocab_size: int | None) -> dict:
    assert weights.to_target is not None
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": weights.heads[0].weight.shape[0],
        "vocab_size": vocab_size,
        "truncated_vocab_size": len(weights.to_target),
        "num_heads": len(weights.heads),
        "num_hidden_layers": weights.layers,
        "medusa_fc_bias": True,
    }


def _counts(folder: Path, config: dict, vllm: bool) -> tuple[int, int]:
    """Number of heads and of residual blocks in each, as the config says."""
    if config.get("original_lm_head"):
        raise ValueError(
            f"{folder}: original_lm_head, heads that share one product, is not "
            "supported; store a product for each"
        )
    names = ("num_heads", "num_hidden_layers")
    if not vllm:
        names = ("medusa_num_heads", "medusa_num_layers")
    absent = [key for key in names if key not in config]
    if absent:
        raise ValueError(
            f"config.json in {folder} is none of Medusa heads: it lacks {absent}"
        )
    heads, layers = (checks.count(f"{folder}: {k}", config[k], 1) for k in names)
    return heads, layers


def _head_of(key: str) -> int:
    """The head that a key of the authors belongs to, -1 if it is none of a head's."""
    first = key.split(".")[0]
    return int(first) if first.isdecimal() else -1


def _draft_ids(folder: Path, found: dict, target: Model) -> np.ndarray | None:
    """Target ids of the heads' rows, or None where they agree."""
    if "token_map" not in found:
        return None
    ids = np.asarray(found["token_map"]).ravel()
    return tensors.target_ids(folder, "token_map", ids, target.config.vocab_size)


def _rows(
    folder: Path, product: np.ndarray | None, ids: np.ndarray | None, target: Model
) -> int:
    """Rows of a head's product; refuses heads made for another target."""
    vocab, width = target.config.vocab_size, target.config.hidden
    known = {vocab} if ids is None else {vocab, len(ids)}
    if product is None or product.ndim != 2:
        return vocab
    if product.shape[1] != width or product.shape[0] not in known:
        raise ValueError(
            f"{folder} holds heads of width {product.shape[1]} for {product.shape[0]} "
            f"tokens, but {target.name} has width {width} and {vocab} tokens; heads "
            "draft for the model that they were trained on"
        )
    return product.shape[0]


def _shapes(
    layout: Layout, heads: int, layers: int, product: tuple[int, int], biased: bool
) -> dict[str, tuple[int, ...]]:
    """Every key of the layout and its shape."""
    table: dict[str, tuple[int, ...]] = {}
    width = product[1]
    for i in range(heads):
        table |= dict.fromkeys(layout.blocks(i, layers, "weight"), (width, width))
        if biased:
            table |= dict.fromkeys(layout.blocks(i, layers, "bias"), (width,))
        table[layout.vocab.format(i=i)] = product
    return table


def _head(
    kept: dict, layout: Layout, i: int, ids: np.ndarray | None, target: Model
) -> MedusaHead:
    weight = kept[layout.blocks(i, 1, "weight")[0]]
    bias = kept.get(layout.blocks(i, 1, "bias")[0], np.zeros(len(weight)))
    vocab = kept[layout.vocab.format(i=i)]
    if ids is not None and len(vocab) != len(ids):
        vocab = vocab[ids]
    return MedusaHead(*(jnp.asarray(x, target.dtype) for x in (weight, bias, vocab)))


def _check_shared(
    folder: Path, kept: dict, layout: Layout, heads: int, layers: int
) -> None:
    for i in range(heads):
        for part in ("weight", "bias"):
            keys = [key for key in layout.blocks(i, layers, part) if key in kept]
            for other in keys[1:]:
                if not np.array_equal(kept[keys[0]], kept[other]):
                    raise ValueError(
                        f"{folder}: {other} differs from {keys[0]}, but the residual "
                        "blocks of a Medusa head share their weights"
                    )
