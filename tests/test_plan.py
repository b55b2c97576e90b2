"""The plan's choices: how many groups a micro-step's anchors run in."""

from pathlib import Path

import numpy as np
import pytest

from dflash_graph import plan as plan_module
from dflash_graph.plan import make_plan
from dflash_graph.training import train
from tests.tiny import tiny_config, weights


@pytest.mark.parametrize("fitting", [1, 2, 4, 8])
def test_the_fewest_anchor_groups_that_fit(tiny: Path, monkeypatch: pytest.MonkeyPatch, fitting: int) -> None:
    plan = make_plan(tiny_config(tiny, tiny / "unused"))
    assert plan.config.num_anchors >= 8
    assert plan.kept_bytes(1) > plan.kept_bytes(2) > plan.kept_bytes(4) > plan.kept_bytes(8)
    monkeypatch.setattr(plan_module, "_activation_limit", lambda device: plan.kept_bytes(fitting))
    assert plan.anchor_groups == fitting
    mib = plan.kept_bytes(fitting) / 2**20
    assert f"anchor groups {fitting}, activations {mib:.0f} MiB" in str(plan)


def test_most_groups_where_none_fits_and_never_more_than_anchors(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "_activation_limit", lambda device: 0)
    assert make_plan(tiny_config(tiny, tiny / "unused")).anchor_groups == 8
    assert make_plan(tiny_config(tiny, tiny / "unused", "drafter.num_anchors=3")).anchor_groups == 2
    assert make_plan(tiny_config(tiny, tiny / "unused", "devices.anchor_groups=3")).anchor_groups == 3
    few = tiny_config(tiny, tiny / "unused", "drafter.num_anchors=3", "devices.anchor_groups=9")
    assert make_plan(few).anchor_groups == 3


def test_a_run_in_groups_trains_the_same_drafter(tiny: Path, tmp_path: Path) -> None:
    """Weights after an epoch agree up to the order of sums, and are not bitwise equal: the groups did run."""
    for groups in (1, 3):
        train(tiny_config(tiny, tmp_path / str(groups), f"devices.anchor_groups={groups}", "epochs=1"))
    one, three = (weights(tmp_path / str(groups)) for groups in (1, 3))
    masters = {name for name in one if not name.startswith(("exp_avg", "step"))}
    assert any(one[name] != three[name] for name in masters)
    for name in masters:
        np.testing.assert_allclose(np.frombuffer(three[name], "f4"), np.frombuffer(one[name], "f4"), atol=1e-3)
