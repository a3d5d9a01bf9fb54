"""Random prediction modules of transformers, as checkpoints and as a loop over rows."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

sys.path.append(str(Path(__file__).parent.parent / "models"))

import oracle

# What checkpoints call a module's parts besides its layer, and what its names begin with.
BEHIND = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "post_norm": "shared_head.norm",
}
MIMO = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "post_norm": "final_layernorm",
}


def build(family: str, count: int):
    """A random target of a family and ``count`` random modules."""
    mimo = family == "mimo"
    changes = (
        {"use_sliding_window": False, "tie_word_embeddings": False} if mimo else {}
    )
    name = "qwen2" if mimo else family
    target = oracle.build(name, num_nextn_predict_layers=count, **changes)
    if mimo:  # which is not in transformers, but all of it is
        target.config.num_mtp_layers = count
        target.config.mtp_layer_types = ["full_attention"] * count
        target.config.mtp_hidden_states_first = True
    modules = MtpModel(target, count).eval()
    modules.config._attn_implementation = "eager"
    torch.manual_seed(1)
    with torch.no_grad():
        for key, p in modules.layers.named_parameters():
            noise = torch.randn(p.shape)
            if "norm" in key:
                p += 0.2 * noise
            else:
                p.copy_(noise * 1.3 / p.shape[-1] ** 0.5)
        for key, b in modules.layers.named_buffers():
            if key.endswith("e_score_correction_bias"):
                b.copy_(0.3 * torch.randn(b.shape))
    return target, modules


def save(target, modules, folder: Path) -> Path:
    """Writes both into one checkpoint, the modules behind the target's layers."""
    oracle.save(target, folder)
    file = folder / "model.safetensors"
    tensors, depth = load_file(file), target.config.num_hidden_layers
    mimo = hasattr(target.config, "mtp_hidden_states_first")
    for key, x in modules.layers.state_dict().items():
        module, head, rest = key.split(".", 2)
        behind = f"model.layers.{depth + int(module)}."
        prefix = f"model.mtp_layers.{module}." if mimo else behind
        named = (MIMO if mimo else BEHIND).get(head)
        name = f"{named}.{rest}" if named else rest
        tensors |= {prefix + k: v.contiguous() for k, v in by_expert(name, x).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    if mimo:
        edit(folder, model_type="mimo", layer_types=None)
    return folder


def by_expert(name: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor of all experts as checkpoints hold it, one per expert."""
    start, found, kind = name.partition("experts.")
    if not found or "shared" in start:
        return {name: x}
    if kind == "down_proj":
        return {f"{start}experts.{e}.down_proj.weight": w for e, w in enumerate(x)}
    out = {}
    for e, both in enumerate(x):
        gate, up = both.chunk(2)
        out[f"{start}experts.{e}.gate_proj.weight"] = gate
        out[f"{start}experts.{e}.up_proj.weight"] = up
    return out


def hidden(target, ids: np.ndarray) -> torch.Tensor:
    """``[1, T, M]`` last hidden states after the final norm."""
    with torch.no_grad():
        out = target(torch.tensor(ids), use_cache=False, output_hidden_states=True)
    return out.hidden_states[-1]


def draft(modules, features: torch.Tensor, ids: list[int], gamma: int):
    """Greedy drafts after a text and their logits ``[gamma, V]``, without a cache.

    Row ``r`` of module ``m`` joins token ``r + 1`` to row ``r - 1`` of module ``m - 1``;
    module 0 has the target's features, and the last module's rows where there are none.
    """
    ids, known, count = list(ids), len(ids) - 1, len(modules.layers)
    logits = []
    for step in range(gamma):
        outs: list[dict] = [{} for _ in range(count)]
        for row in range(len(ids) - 1):
            for m in range(count):
                if _has_row(m, row, known, count):
                    outs[m][row] = _run(modules, outs, features, ids, known, m, row)
        logits.append(modules.shared_head(outs[step % count][len(ids) - 2]))
        ids.append(int(logits[-1].argmax()))
    return ids[known + 1 :], torch.stack(logits).detach().numpy()


def _has_row(m: int, row: int, known: int, count: int) -> bool:
    """Does the chain of rows that a row is made of begin at a feature?"""
    while row >= 0 and not (m == 0 and row < known):
        m, row = (m - 1) % count, row - 1
    return row >= 0


def _run(modules, outs, features, ids, known, m, last) -> torch.Tensor:
    """Output ``[M]`` of module ``m`` at row ``last``, of all its rows up to there."""
    rows = [r for r in range(last + 1) if _has_row(m, r, known, len(outs))]
    fed = [features[0, r] if m == 0 and r < known else outs[m - 1][r - 1] for r in rows]
    embedded = modules.embed_tokens(torch.tensor([[ids[r + 1] for r in rows]]))
    mask = torch.full((len(rows), len(rows)), float("-inf")).triu(1)[None, None]
    at = torch.tensor([rows])
    with torch.no_grad():
        out = modules.layers[m](
            embedded,
            torch.stack(fed)[None],
            position_embeddings=modules.rotary_emb(embedded, at),
            attention_mask=mask,
            position_ids=at,
            cache=None,
        )
    return out[0, -1]


def edit(folder: Path, **changes) -> None:
    """Sets keys of ``config.json``."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
