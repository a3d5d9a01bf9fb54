"""A byte-level tokenizer with a chat template, and conversations in it."""

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jspec.train.corpus import Conversation, write
from jspec.train.template import fingerprint, template

TEMPLATE = (
    "<s>system\nBe brief.<e>\n"
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
EOS, START, VOCAB = 256, 257, 258


def chat_tokenizer(chat_template=TEMPLATE, swap=()):
    """One token a byte, ``<e>`` and ``<s>``; ``swap`` exchanges two characters' ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)} | {"<e>": EOS, "<s>": START}
    if swap:
        a, b = swap
        vocab[a], vocab[b] = vocab[b], vocab[a]
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<e>",
        additional_special_tokens=["<s>"],
    )
    fast.chat_template = chat_template
    return fast


def conversations(sizes, cap=20, seed=0):
    """Random ones with answers of these sizes, the end included; larger ones are cut."""
    rng = np.random.default_rng(seed)

    def words(count):
        return rng.integers(97, 123, count).tolist()

    return [
        Conversation(
            [*words(1 + i % 7), EOS], [*words(min(n, cap) - 1), EOS], 0.6 * (i % 2)
        )
        for i, n in enumerate(sizes)
    ]


def write_file(path, made, tokenizer=None, cap=20, target="tiny"):
    """``write`` with the pieces of a tokenizer."""
    tokenizer = tokenizer or chat_tokenizer()
    write(
        path,
        made,
        form=template(tokenizer),
        eos_ids=(EOS,),
        cap=cap,
        target=target,
        tokenizer=fingerprint(tokenizer),
    )
    return path
