"""Cost tables: monotone, stored as JSON, and refused when they say nothing."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import roofline
from jspec.serve import costs
from jspec.testing import tiny


def test_a_table_is_monotone_and_read_between_its_points():
    table = costs.table({4: 2.0, 1: 1.0, 8: 1.5, 16: 4.0})
    np.testing.assert_allclose(table.seconds, [1, 2, 2, 4])
    at = jnp.array([0.0, 1.0, 2.5, 6.0, 16.0, 24.0])
    np.testing.assert_allclose(table.at(at), [1, 1, 1.5, 2, 4, 6])


@pytest.mark.parametrize("points", [{}, {4: 1.0}])
def test_an_empty_or_one_point_table_is_refused(points):
    with pytest.raises(ValueError, match=f"{len(points)} points.*at least two"):
        costs.table(points)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ({0: 1.0, 2: 1.0}, "rows must be an integer >= 1"),
        ({1: 0.0, 2: 1.0}, "seconds at 1 rows must be finite and > 0"),
        ({1: 1.0, 2: float("nan")}, "seconds at 2 rows"),
    ],
)
def test_bad_points_are_named(points, message):
    with pytest.raises(ValueError, match=message):
        costs.table(points)


def test_json_there_and_back(tmp_path):
    file = tmp_path / "costs.json"
    costs.save(file, {1: 0.5, 8: 0.75}, target="tiny", batch=1)
    np.testing.assert_allclose(costs.load(file).seconds, [0.5, 0.75])
    assert json.loads(file.read_text())["target"] == "tiny"
    for text in ("[]", "{", '{"rows": [1], "seconds": [1, 2]}', '{"rows": [1, 2]}'):
        file.write_text(text)
        with pytest.raises(ValueError, match="is no cost table"):
            costs.load(file)
    file.write_text('{"rows": [2, 2], "seconds": [1, 2]}')
    with pytest.raises(ValueError, match="twice"):
        costs.load(file)


def test_a_device_is_measured():
    model = tiny.model(layers=1)
    found = costs.measured(model, batch=2, widths=(1, 3), context=20, runs=1)
    assert sorted(found) == [2, 6] and min(found.values()) > 0
    costs.table(found)
    with pytest.raises(ValueError, match="two or more"):
        costs.measured(model, widths=(2, 2))
    with pytest.raises(ValueError, match="context is 600"):
        costs.measured(model, context=600)


def test_rounds_are_measured_with_their_drafts():
    model = tiny.model(layers=1)
    draft = jspec.load_drafter(tiny.model(seed=1), model, gamma=3)
    options = dict(batch=2, context=20, runs=1, temperature=0.8)
    found = costs.of_rounds(model, draft, widths=(1, 2, 9), **options)
    assert sorted(found) == [2, 4, 8] and min(found.values()) > 0


def test_an_absent_chip_is_predicted():
    sizes = dict(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16)
    cost = roofline.ModelCost(**sizes, intermediate=128, vocab=1000)
    found = costs.predicted(cost, roofline.CHIPS["v5e"], batch=4, widths=(1, 64))
    assert found[4] < found[256]
    costs.table(found)
