"""The demo at a tenth of its length: what it leaves, and what it uses again."""

import pytest
from matplotlib.image import imread

from .conftest import load

pytest.importorskip("matplotlib", reason="the demo draws with Matplotlib")


@pytest.mark.slow
def test_the_demo_leaves_a_picture_and_two_runs_and_uses_only_the_same_ones_again(
    tmp_path, capfd, monkeypatch
):
    demo = load("demo")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")  # too little data for a cost model
    root = str(tmp_path / "demo")
    small = {"total_timesteps": 5_000, "reward_timesteps": 10_000, "queries": 50}
    demo.demo(demo.Args(runs_dir=root, **small))
    said = capfd.readouterr().out
    assert "\n2 of 3: a cost, learned from 50 labelled pairs, and a policy under it\n" in said
    assert said.count(f"--runs-dir {root}") == 2  # two commands, to be typed again
    assert "(limit 5, 50 episodes)" in said
    height, width, _ = imread(tmp_path / "demo" / "demo.png").shape
    assert width > 2.5 * height  # three panels

    demo.demo(demo.Args(runs_dir=root, **small))
    assert f"--runs-dir {root}" not in capfd.readouterr().out  # nothing is trained again
    with pytest.raises(ValueError, match=r"reward was trained with seed=0; remove .*demo, or name"):
        demo.demo(demo.Args(runs_dir=root, seed=1, **small))
    with pytest.raises(ValueError, match=r"trained with offline_queries=50, online_queries=50;"):
        demo.demo(demo.Args(runs_dir=root, **{**small, "queries": 60}))
