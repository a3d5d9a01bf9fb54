"""Gemma 4's assistant against transformers, and as a drafter of a Gemma 3 target."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import jspec
from jspec import cli, cli_heads, models
from jspec.cache import KVCache
from jspec.drafters import assistant
from jspec.drafters.published_assistant import load_assistant
from jspec.models.config import Rope
from jspec.testing import tiny

KINDS = ["sliding_attention", "full_attention"]
DIM, VOCAB, WINDOW = 8, 60, 5


def target(**changes):
    """A Gemma 3 of four layers; the last sliding one is layer 2, the last full one 3."""
    options = dict(
        family="gemma3_text",
        vocab_size=VOCAB,
        layers=4,
        hidden=24,
        head_dim=DIM,
        windows=(6, None, 6, None),
        ropes=(Rope(),) * 4,
        zero_centred=True,
        qk_norm=True,
        sandwich_norm=True,
        embed_scale=24**0.5,
        activation="gelu_pytorch_tanh",
        tie_embeddings=True,
    )
    return tiny.model(seed=5, scale=0.25, **{**options, **changes})


TARGET = target()


def published(folder, **changes):
    """A random assistant as transformers saves it."""
    torch.manual_seed(0)
    text = transformers.Gemma4TextConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=DIM,
        global_head_dim=DIM,
        sliding_window=WINDOW,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        num_kv_shared_layers=2,
        layer_types=KINDS,
    )
    config = transformers.Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=24, **changes
    )
    model = transformers.Gemma4AssistantForCausalLM(config).eval()
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.3 * torch.randn_like(x)) if x.ndim > 1 else x.mul_(1.1)
        for layer in model.model.layers:
            layer.layer_scalar.fill_(0.8)
        if model.masked_embedding is not None:
            model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=[False, True], ids=["all", "clusters"])
def both(request, tmp_path_factory):
    """Transformers' assistant and ours, read from what it saved."""
    folder = tmp_path_factory.mktemp("assistant")
    options = dict(num_centroids=6, centroid_intermediate_top_k=2)
    theirs = published(folder, use_ordered_embeddings=request.param, **options)
    return theirs, load_assistant(folder, TARGET), folder


def cached(length, slots=16):
    rng = np.random.default_rng(length)
    k, v = (rng.normal(size=(4, 1, 2, slots, DIM)).astype(np.float32) for _ in "kv")
    garbage = np.arange(slots) >= length
    k[..., garbage, :], v[..., garbage, :] = 1e3, 1e3
    return k, v


@pytest.mark.parametrize("length", [1, 4, 11])
def test_logits_are_those_of_transformers(both, length):
    """Three steps of one round, within and beyond the window."""
    theirs, ours, _ = both
    k, v = cached(length)
    cache = KVCache(
        tuple(jnp.asarray(x.swapaxes(-1, -2)) for x in k),
        tuple(jnp.asarray(x) for x in v),
        jnp.asarray([length]),
    )
    seen = assistant.views(*ours, cache)
    shared = {
        kind: (torch.tensor(k[i][:, :, :length]), torch.tensor(v[i][:, :, :length]))
        for kind, i in zip(KINDS, (2, 3), strict=True)
    }
    hidden = np.random.default_rng(1).normal(size=(1, 24)).astype(np.float32)
    token, theirs_hidden = 7, torch.tensor(hidden)[:, None]
    ours_hidden = jnp.asarray(hidden)
    for _ in range(3):
        logits, ours_hidden = assistant.step(
            *ours, seen, jnp.asarray([token]), ours_hidden
        )
        embedded = np.asarray(TARGET.params.embed[token]) * 24**0.5
        embedded = torch.tensor(embedded, dtype=torch.float32)[None, None]
        with torch.no_grad():
            out = theirs(
                inputs_embeds=torch.cat([embedded, theirs_hidden], -1),
                position_ids=torch.tensor([[length]]),
                shared_kv_states=shared,
            )
        theirs_hidden = out.last_hidden_state
        looked_into = np.isfinite(np.asarray(logits[0]))
        assert looked_into.sum() == (20 if ours.weights.centroids is not None else 60)
        np.testing.assert_allclose(
            np.asarray(logits[0])[looked_into],
            out.logits[0, 0].numpy()[looked_into],
            rtol=1e-4,
            atol=1e-5,
        )
        np.testing.assert_allclose(
            ours_hidden[0], theirs_hidden[0, 0].numpy(), rtol=1e-4, atol=1e-5
        )
        token = int(jnp.argmax(logits[0]))
        assert token == int(out.logits[0, 0].argmax())


def test_it_drafts_for_a_gemma(both):
    """Greedy and coupled output are the target's own; drafts follow the features."""
    *_, folder = both
    draft = jspec.load_drafter(folder, TARGET, gamma=3)
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [5], [7, 8, 9]]
    for options in ({}, {"temperature": 0.8, "seed": [1, 2, 3]}):
        rule = {"rule": jspec.verify.coupled} if options else {}
        want = jspec.generate(TARGET, None, prompts, max_new_tokens=16, **options)
        got = jspec.generate(
            TARGET, draft, prompts, max_new_tokens=16, **options, **rule
        )
        assert got.tokens == want.tokens


@pytest.mark.parametrize(
    "change, model, message",
    [
        ({"backbone_hidden_size": 32}, {}, "width 32 .* width 24"),
        ({}, {"vocab_size": 61}, "60 tokens, but tiny has .* 61"),
        ({}, {"head_dim": 16}, "size 8, the keys of tiny 16"),
        ({}, {"windows": (None,) * 4}, "sliding_attention layer; tiny has none"),
        ({"num_centroids": 7}, {}, "60 tokens in 7 clusters"),
        ({"text": {"enable_moe_block": True}}, {}, "enable_moe_block"),
        ({"text": {"layer_types": None}}, {}, "layer_types"),
        ({"text": {"intermediate_size": 21}}, {}, "gate_proj.weight is"),
        (
            {"text": {"rope_parameters": {"full_attention": {
                "rope_type": "yarn", "rope_theta": 1e4}}}},
            {},
            "rope_type",
        ),
    ],
)  # fmt: skip
def test_an_assistant_that_does_not_fit_is_refused(tmp_path, change, model, message):
    published(tmp_path, use_ordered_embeddings=True, num_centroids=6,
              centroid_intermediate_top_k=2)  # fmt: skip
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["text_config"] |= change.pop("text", {})
    file.write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message):
        load_assistant(tmp_path, target(**model))


def test_it_drafts_chains_only(both):
    *_, folder = both
    with pytest.raises(ValueError, match="an assistant, which drafts chains"):
        jspec.load_drafter(folder, TARGET, grower=jspec.drafters.growth.chain(3))
    with pytest.raises(ValueError, match="gamma is 0"):
        jspec.load_drafter(folder, TARGET, gamma=0)


def test_the_command_line_knows_it(both, tmp_path, capsys):
    _, ours, folder = both
    facts = cli_heads._facts(ours)
    assert facts["reads"] == "target layers 2, 3"
    clusters = "all tokens" if ours.weights.centroids is None else "2 of 6 clusters"
    assert facts["logits of"] == clusters
    where = str(models.save(TARGET, tmp_path / "target"))
    words = ["export", str(folder), str(tmp_path / "out"), "--target", where]
    assert cli.main(words) == 2
    assert "those are read, not written" in capsys.readouterr().err
