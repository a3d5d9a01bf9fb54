"""Which axis of a weight tensor parallelism splits: the Megatron layout on fused arrays.

Queries, keys and values by kv head, the output product by its input, the MLP by its inner
width, embedding and head by vocabulary. Source: Shoeybi et al. 1909.08053.
"""

# Field of a weight -> how many axes it has, and which of them is split. Weights of experts
# have one axis more.
SPLIT = {
    "qkv": (4, 0),
    "qkv_bias": (3, 0),
    "out": (2, 1),
    "gate_up": (3, 1),
    "gate_up_bias": (2, 1),
    "down": (2, 1),
    "embed": (2, 0),
    "head": (2, 0),
}
