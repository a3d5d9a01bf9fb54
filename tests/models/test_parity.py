"""jspec against transformers on random tiny models of every family."""

import dataclasses
import json

import numpy as np
import oracle
import pytest

import jspec.models as models
from jspec.models.hf import config_from_hf, config_to_hf

T = 40  # five windows of 8
TOLERANCE = 1e-4


def gap(a, b):
    return float(np.abs(a - b).max())


@pytest.mark.parametrize("name", oracle.FAMILIES)
def test_family_whole_chunked_and_step_by_step(name, tmp_path):
    hf = oracle.build(name)
    model = models.load(oracle.save(hf, tmp_path))
    ids = oracle.tokens(T)
    expected = oracle.hf_logits(hf, ids)
    assert np.abs(expected).max() > 1
    assert gap(oracle.logits(model, ids), expected) < TOLERANCE
    # Blocks and single tokens beyond the sliding window.
    chunks = [13, 7, 5, 5] + [1] * 10
    assert gap(oracle.logits(model, ids, chunks), expected) < TOLERANCE
    assert gap(oracle.logits(model, ids, [1] * T), expected) < TOLERANCE
    assert gap(oracle.hf_steps(hf, ids), expected) < TOLERANCE


