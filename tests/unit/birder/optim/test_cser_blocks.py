"""The blockwise sparsifier: which blocks, how many, and that nothing is lost. No ranks."""

from __future__ import annotations

import math

import hydra.utils
import pytest
import torch
import yaml

from birder import CSER, overall_ratio
from birder.optim.sparse import Blocks
from tests.helpers import ROOT
from tests.helpers.reference_cser import choice

CPU = torch.device("cpu")
CONF = ROOT / "conf/optimizer"
FALSE_ALARM = 1e-6  # the chance that a statistical test here fails for correct code with another seed; seeds are fixed
SIGMAS = 4.9  # two-sided normal quantile of FALSE_ALARM


def mask(start: int, numel: int, ratio: int | None, block: int, step: int = 1, stream: int = 1, seed: int = 9):
    """bool[numel]: what `Blocks` chooses."""
    chosen = Blocks.choose(start, numel, ratio, block, seed=seed, step=step, stream=stream, device=CPU)
    flat = torch.zeros(numel)
    chosen.add(flat, torch.ones(chosen.numel))
    assert int(flat.sum()) == chosen.numel
    return flat.bool()


@pytest.mark.parametrize(("ratio", "block"), [(1, 7), (3, 5), (8, 16), (64, 32), (1000, 1)])
def test_one_block_of_every_run(ratio, block):
    whole = mask(0, 4 * ratio * block, ratio, block).view(4, ratio, block)
    assert (whole.all(2) == whole.any(2)).all()  # blocks are not cut
    assert (whole.any(2).sum(1) == 1).all()


@pytest.mark.parametrize("start", [0, 1, 31, 32, 96, 2**33 + 32])
@pytest.mark.parametrize("numel", [0, 1, 5, 32, 47, 48, 500])
def test_any_piece_has_what_the_reference_chooses(start, numel):
    block, ratio = 48, 3
    base = start // (block * ratio) * block * ratio
    if base < 10**6:
        expected = choice(start + numel, ratio, block, seed=9, step=1, stream=1)[start:]
    else:  # too far out for the reference: two pieces against one
        whole = mask(base, start - base + numel, ratio, block)
        assert int(mask(base, block * ratio, ratio, block).sum()) == block
        expected = whole[start - base :]
    assert torch.equal(mask(start, numel, ratio, block), expected)


def test_every_block_is_chosen_equally_often_and_compressors_are_independent():
    ratio, runs, steps = 8, 500, 8
    counts, together = torch.zeros(ratio), 0
    for step in range(1, steps + 1):
        first, second = (mask(0, ratio * runs, ratio, 1, step, stream=s).view(runs, ratio) for s in (1, 2))
        counts += first.sum(0)
        together += int((first & second).sum())
    draws = runs * steps
    spread = (draws / ratio * (1 - 1 / ratio)) ** 0.5
    assert ((counts - draws / ratio).abs() < (SIGMAS + 0.5) * spread).all()  # of 8 counts none
    assert abs(together - draws / ratio) < SIGMAS * spread


def test_the_error_is_what_was_not_sent():
    v = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    lost = 0.0
    for step in range(1, 401):
        chosen = Blocks.choose(37, 1000, 4, 20, seed=0, step=step, stream=1, device=CPU)
        error, sent = v.clone(), torch.zeros(1000)
        chosen.add(error, chosen.gather(v), -1)
        chosen.add(sent, chosen.gather(v))
        assert torch.equal(sent + error, v)
        assert not (sent * error).any()
        lost += float(error.square().sum() / v.square().sum()) / 400
    # E |v - C(v)|^2 = (1 - 1/4) |v|^2; the spread over 50 blocks in 13 runs and 400 steps is below 0.4 %.
    assert abs(lost - 0.75) < 0.02


def test_nothing_is_chosen_without_a_ratio():
    chosen = Blocks.choose(5, 100, None, 8, seed=0, step=1, stream=1, device=CPU)
    assert chosen.numel == 0
    assert chosen.gather(torch.ones(100)).numel() == 0


# (R_C2, R_C1, H): overall ratio, from the paper's experiments.
GRID = {
    (4, 2, 2): 2, (8, 2, 4): 4, (8, 4, 2): 4, (16, 8, 2): 8, (32, 4, 8): 16, (64, 1, 64): 32, (2048, 32, 64): 1024,
    (64, 4, 16): 32, (512, 16, 32): 256, (2048, 8, 256): 1024, (None, 32, 1): 32, (None, 8, 4): 32, (None, 16, 16): 256,
}  # fmt: skip


@pytest.mark.parametrize("setting", GRID)
def test_overall_ratio(setting):
    assert overall_ratio(*setting) == pytest.approx(GRID[setting], rel=1e-12)
    if setting[0] is None:
        assert overall_ratio(float("inf"), *setting[1:]) == pytest.approx(GRID[setting], rel=1e-12)
        assert overall_ratio(*setting, variant="released") == pytest.approx(GRID[setting], rel=1e-12)


def test_overall_ratio_at_the_ends():
    assert overall_ratio(1, 4, 8) == 1
    # With H = 4: 3 steps of 1/8 and 1 of 1/2.
    assert overall_ratio(8, 2, 4, variant="released") == pytest.approx(4 / (3 / 8 + 1 / 2))


@pytest.mark.parametrize(
    "setting", [(0, 4, 8), (2.5, 4, 8), (8, 0, 8), (8, 2, 0), (8, 2, 4, "Released"), (None, math.inf, 1)]
)
def test_overall_ratio_takes_what_the_optimizer_takes(setting):
    with pytest.raises(ValueError, match="must be"):
        overall_ratio(*setting)


@pytest.mark.parametrize("name", ["cser", "csea", "cser_pl", "local_sgd", "qsparse", "ef_sgd"])
def test_configurations_make_what_they_are_called(name):
    section = dict(yaml.safe_load((CONF / f"{name}.yaml").read_text())["optimizer"])
    cls = hydra.utils.get_class(section.pop("_target_"))
    optimizer = cls([torch.nn.Parameter(torch.zeros(3))], **section)
    if name in ("csea", "cser_pl", "local_sgd"):
        assert optimizer.gradient_ratio is None
    if name == "csea":
        assert optimizer.reset_every == 1 < optimizer.model_ratio
    if name == "cser_pl":
        assert optimizer.reset_every > 1 < optimizer.model_ratio
    if name == "local_sgd":
        assert optimizer.reset_every > 1 == optimizer.model_ratio


def test_a_state_without_the_error_is_refused():
    def make(implementation: str) -> CSER:
        optimizer = CSER([torch.nn.Parameter(torch.zeros(3))], implementation=implementation)
        optimizer.bind()
        return optimizer

    with pytest.raises(ValueError, match=r"the saved state holds \['momentum'\]"):
        make("I").load_state_dict(make("II").state_dict())


def test_the_common_model_of_a_parameter_that_joins_is_the_parameter() -> None:
    """It began at 0, so that the error was the whole weight, and resets sent it."""
    first, later = (torch.nn.Parameter(torch.full((64,), value)) for value in (1.0, 2.0))
    optimizer = CSER([first], lr=0.01, gradient_ratio=8, model_ratio=2, reset_every=3, block=8)
    for _ in range(4):
        first.grad = torch.ones(64)
        optimizer.step()
    optimizer.add_param_group({"params": [later]})
    first.grad, later.grad = torch.ones(64), torch.ones(64)
    optimizer.step()
    assert (optimizer.state[later]["common"] - 2.0).abs().max() < 0.1
