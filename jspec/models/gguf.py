"""GGUF files: tensors, config and tokenizer of llama.cpp's format, without torch.

Reading and dequantising are the ``gguf`` package's. This file says what llama.cpp did
to a checkpoint when it wrote the file, and undoes it.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType
from gguf.quants import dequantize

from jspec.models import gguf_meta

# llama.cpp's names of the tensors of one block, and transformers'.
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA_BLOCK = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
_ROWS = 4096  # dequantised at a time
_UNUSED = ("rope_freqs.weight",)  # read into the config


class _Reader(GGUFReader):
    """The package's reader, with metadata arrays read in one go.

    The package makes two numpy arrays per element: 23 seconds for a vocabulary of
    262144 tokens. Same result in the same form; were the package to rename this method,
    its own, slower one would serve.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int):
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        item = self._get(orig_offs, np.uint32)
        count = self._get(orig_offs + 4, np.uint64)
        kind, offset = GGUFValueType(int(item[0])), orig_offs + 12
        scalar = self.gguf_scalar_to_np.get(kind)
        if scalar is not None:
            values = [self._get(offset, scalar, int(count[0]))]
            size = values[0].nbytes
        elif kind == GGUFValueType.STRING:
            # A plain array: slicing a memmap object is ten times slower.
            plain = self.data.view(np.ndarray)
            values, size = _strings(plain, offset, int(count[0]))
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        types = [GGUFValueType.ARRAY, kind]
        places = list(range(2, 2 + len(values)))
        return 12 + size, [item, count, *values], places, types


def _strings(data: np.ndarray, start: int, count: int) -> tuple[list[np.ndarray], int]:
    values, at = [], start
    view = data.data
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", view, at)
        values.append(data[at + 8 : at + 8 + length])
        at += 8 + length
    return values, at - start


class File:
    """An open GGUF: ``config`` is an HF-style dict, ``tensors`` HF name -> shape.

    Raises:
      ValueError: truncated or no GGUF, split, an architecture or a feature that is not
        supported; the message names the file.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            reader = _Reader(path)
        except (ValueError, IndexError, KeyError, struct.error) as error:
            raise ValueError(
                f"{path} is truncated or not a GGUF file ({error}); fetch it again"
            ) from error
        self.metadata = {
            key: _plain(field.contents()) for key, field in reader.fields.items()
        }
        self.architecture = self.metadata.get("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"{path}: general.architecture = {self.architecture!r} is not supported "
                f"({', '.join(ARCHITECTURES)})"
            )
        if self.metadata.get("split.count", 1) > 1:
            raise ValueError(
                f"{path} is one of {self.metadata['split.count']} parts; join them with "
                "llama.cpp's llama-gguf-split --merge"
            )
        self._stored = {t.name: t for t in reader.tensors}
        self._names = {
            hf_name(self.architecture, name): name
            for name in self._stored
            if name not in _UNUSED
        }
        self.tensors = {
            name: tuple(int(n) for n in reversed(self._stored[stored].shape))
            for name, stored in self._names.items()
        }
        freqs = self._stored.get("rope_freqs.weight")
        self.config = gguf_meta.config(
            self.metadata, self.tensors, None if freqs is None else freqs.data
        )

    def read(self, name: str, out: np.ndarray) -> None:
        """Dequantises the tensor with this HF name into ``out`` (any float dtype)."""
        stored = self._stored[self._names[name]]
        shape = self.tensors[name]
        if self.architecture == "llama" and re.search(r"[qk]_proj\.", name):
            heads = "num_key_value_heads" if "k_proj" in name else "num_attention_heads"
            values = self._dequantize(stored, stored.data).reshape(shape)
            out[...] = unpermute(values, self.config[heads]).reshape(out.shape)
            return
        # llama.cpp stores Gemma's norms as 1 + w.
        norm = self.architecture == "gemma3" and name.endswith("norm.weight")
        excess = 1.0 if norm else 0.0
        if not out.flags.c_contiguous:
            values = self._dequantize(stored, stored.data)
            out[...] = values.reshape(out.shape) - excess
            return
        # In pieces: a large embedding would else be in memory twice.
        rows = out.reshape(shape)
        for at in range(0, shape[0], _ROWS):
            piece = slice(at, at + _ROWS)
            rows[piece] = self._dequantize(stored, stored.data[piece]) - excess

    def _dequantize(self, stored, data: np.ndarray) -> np.ndarray:
        try:
            return dequantize(data, stored.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.path}: tensor {stored.name} has type "
                f"{stored.tensor_type.name}, which the gguf package cannot dequantise"
            ) from error


def hf_name(architecture: str, name: str) -> str:
    """transformers' name of a llama.cpp tensor; unknown names are kept."""
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    stems = _GEMMA_BLOCK if architecture == "gemma3" else _BLOCK
    if match is None or match[2] not in stems:
        return name
    return f"model.layers.{match[1]}.{stems[match[2]]}.{match[3]}"


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows ``[heads * D, ...]`` from llama.cpp's rotary pairing to transformers'.

    llama.cpp's llama rotates the pairs ``(x_2i, x_2i+1)``, transformers
    ``(x_i, x_i+D/2)``; its converter reorders the rows of q and k for that.
    """
    half = rows.shape[0] // heads // 2
    paired = rows.reshape(heads, half, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def _plain(value: Any) -> Any:
    """float32 metadata as the shortest decimal that means it: 1e-05, not 9.99e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
