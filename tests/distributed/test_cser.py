"""CSER's family against the one-process references, bit for bit, and what must hold between ranks.

Virtual ranks for all forms of the family; on real ones one of each class, and what is between them alone.
"""

from __future__ import annotations

import functools

import pytest
import torch

from birder import CSER, EF21SGDM, EFSGD, QSparseLocalSGD
from tests.helpers import reference, reference_cser, toy
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import slow
from tests.helpers.virtual import World, begun, resumed

STEPS, BLOCK, SEED = 22, 24, 5
BASE = {"weight_decay": 0.01, "block": BLOCK, "seed": SEED}
BOTH = {"gradient_ratio": 4, "model_ratio": 2, "reset_every": 5}
NONE = {"gradient_ratio": None}
RELEASED = {"variant": "released"}
# name: (class here, options); the reference has classes of the same names and options.
CASES: dict[str, tuple[type, dict]] = {
    "I": (CSER, BOTH),
    "II": (CSER, {**BOTH, "implementation": "II"}),
    "released": (CSER, {**BOTH, **RELEASED}),
    "no momentum": (CSER, {**BOTH, "momentum": 0.0}),
    "heavy ball": (CSER, {**BOTH, "nesterov": False, "model_ratio": 1}),
    "csea": (CSER, {**NONE, "model_ratio": 8, "reset_every": 1, "implementation": "II"}),
    "cser_pl": (CSER, {**NONE, "model_ratio": 4, "reset_every": 4}),
    "local_sgd": (CSER, {**NONE, "model_ratio": 1, "reset_every": 7, "implementation": "II"}),
    "qsparse": (QSparseLocalSGD, {"ratio": 4, "sync_every": 5}),
    "qsparse released": (QSparseLocalSGD, {"ratio": 2, "sync_every": 3, **RELEASED}),
    "ef_sgd": (EFSGD, {"ratio": 4}),
    "ef_sgd released": (EFSGD, {"ratio": 8, **RELEASED}),
    "ef21_sgdm": (EF21SGDM, {"ratio": 4}),
    "ef21_sgdm top_k": (EF21SGDM, {"ratio": 8, "compressor": "top_k"}),
    "I random_k": (CSER, {**BOTH, "compressor": "random_k"}),
    "I top_k": (CSER, {**BOTH, "compressor": "top_k"}),
    "cser_pl top_k": (CSER, {**NONE, "model_ratio": 4, "reset_every": 4, "compressor": "top_k"}),
    "qsparse top_k": (QSparseLocalSGD, {"ratio": 4, "sync_every": 5, "compressor": "top_k"}),
    "ef_sgd top_k": (EFSGD, {"ratio": 8, "compressor": "top_k"}),
}
SMALL = {"unit_mb": 0.0013}  # three units, whose ends cut blocks
REAL = ("I", "II", "qsparse", "ef_sgd", "ef21_sgdm", "I top_k")
"""What `make test` runs on real ranks too: each class, and messages that each rank chooses for itself."""


def lr_of(step: int) -> float:
    """Another one in each step."""
    return 0.2 * (1 - step / (2 * STEPS))


def build(name: str, rank: int, ranks: int = 0, **how) -> World:
    """So many virtual ranks, or with 0 the own one."""
    cls, options = CASES[name]
    return begun(lambda p: cls(p, **{**BASE, **options}), rank, ranks, **how)


def state(optimizer, name: str, d: int):
    """A state of all units in the common numbering, or zeros where it is not kept."""
    out = torch.zeros(d)
    for unit in optimizer.units:
        if name in unit.state:
            out[unit.start : unit.start + unit.numel] = unit.state[name][: unit.numel]
    return out.numpy()


def outcome(optimizer, x: torch.Tensor, average: torch.Tensor, sent: list[tuple[int, int]]) -> dict:
    return {
        "x": x.numpy(),
        "average": average.numpy(),
        "m": state(optimizer, "momentum", len(x)),
        "e": state(optimizer, "error", len(x)),
        "z": state(optimizer, "common", len(x)),
        "known": state(optimizer, "known", len(x)),
        "sent": sent,
        "kept": {k for u in optimizer.units for k in u.state},
        "units": len(optimizer.units),
    }


def run(rank: int, world: int, names: list[str], ranks: int = 0, poison: tuple = (), **how) -> list[dict]:
    """Of every rank here. poison: (rank, step) at which this rank's gradient is not a number."""
    results: dict[str, list[dict]] = {}
    for name in names:
        made = build(name, rank, ranks, **how)
        layout = reference.Layout(made.model)
        sent = made.train(range(1, STEPS + 1), lr_of, [poison] if poison else ())
        x = made.each(layout.parameters)
        with made.ranks.averaged():
            averages = made.each(layout.parameters)
        assert all(torch.equal(*both) for both in zip(x, made.each(layout.parameters), strict=True))
        results[name] = [outcome(*found) for found in zip(made.optimizers, x, averages, sent, strict=True)]
        made.close()
    return [dict(zip(results, of_rank, strict=True)) for of_rank in zip(*results.values(), strict=True)]


def really(world: int, names: list[str], poison: tuple = (), ranks_per_node: int | None = None, **how) -> list[dict]:
    of_ranks = run_ranks(functools.partial(run, **how), world, names, 0, poison, ranks_per_node=ranks_per_node)
    return [of_rank[0] for of_rank in of_ranks]


@functools.cache
def plain_run(world: int) -> list[dict]:
    return run_ranks(functools.partial(run, **(SMALL if world == 3 else {})), 1, list(CASES), world)[0]


@functools.cache
def real_run(world: int, chosen: bool) -> list[dict]:
    """chosen: the cases of REAL; or else the others."""
    return really(world, [n for n in CASES if (n in REAL) == chosen], **(SMALL if world == 3 else {}))


@functools.cache
def oracle_run(world: int, name: str, poison: tuple[int, int] | None = None) -> reference_cser.Local:
    torch.set_num_threads(1)
    cls, options = CASES[name]
    model = toy.make()
    layout = reference.Layout(model)
    made = getattr(reference_cser, cls.__name__)
    oracle = made(layout.parameters(), world, parts=layout.where, **{**BASE, **options})
    for step in range(1, STEPS + 1):
        rows = []
        for w in range(world):
            layout.load(oracle.x[w])
            g = layout.gradients(lambda w=w, step=step: toy.loss(model, w, step))
            rows.append(torch.zeros_like(g) if poison == (w, step) else g)
        oracle.step(torch.stack(rows), lr_of(step))
    return oracle


@pytest.mark.parametrize("world", [slow(1), slow(2), slow(3), 4, slow(8)])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference_bit_for_bit(world, name):
    """With 3 ranks also: in several units what the reference has in one, as on real ranks."""
    check([result[name] for result in plain_run(world)], name)


CASES_OF_REAL_RANKS = [*((3, name) for name in REAL), *(slow(3, name) for name in CASES if name not in REAL)]


@pytest.mark.parametrize(("world", "name"), CASES_OF_REAL_RANKS)
@pytest.mark.long
def test_real_ranks_equal_the_reference_bit_for_bit(world, name):
    check([result[name] for result in real_run(world, name in REAL)], name)


def check(results: list[dict], name: str) -> None:
    world = len(results)
    oracle = oracle_run(world, name)
    for w, got in enumerate(results):
        assert (got["x"] == oracle.x[w].numpy()).all()
        assert (got["m"] == oracle.m[w].numpy()).all()
        if "error" in got["kept"]:
            assert (got["e"] == oracle.e[w].numpy()).all()
        if "known" in got["kept"]:
            assert (got["known"] == oracle.known[w].numpy()).all()
        if "common" in got["kept"] and CASES[name][0] in (CSER, EF21SGDM):
            assert (got["z"] == oracle.z.numpy()).all()
        assert (got["units"] > 2) == (world == 3)
    assert abs(got["x"] - reference.Layout(toy.make()).parameters().numpy()).max() > 0.1  # it did train


# x is rounded in a step by at most half an eps of its size, and on two ranks by different amounts. That a reset rounds once
# more is made up for by far by errors of both signs.
def rounding(*values) -> float:
    return 2 * STEPS * torch.finfo(torch.float32).eps * max(abs(v).max() for v in values)


@pytest.mark.parametrize("name", ["I", "no momentum", "heavy ball", "cser_pl", "I random_k", "I top_k"])
def test_the_common_point_is_the_same_on_all_ranks(name):
    results = [r[name] for r in plain_run(4)]
    tolerance = rounding(*(r["x"] for r in results))
    first = results[0]
    for r in results[1:]:
        assert (r["z"] == first["z"]).all()
        assert abs(r["x"] - first["x"]).max() > 10 * tolerance  # the models themselves differ
    # The last step is within an interval: there is an error to speak of.
    assert all(abs(r["x"] - r["z"]).max() > 10 * tolerance for r in results)


def test_what_all_know_is_the_mean_of_what_each_has_sent():
    for name in ("ef21_sgdm", "ef21_sgdm top_k"):
        results = [r[name] for r in plain_run(4)]
        assert abs(sum(r["known"] for r in results) / 4 - results[0]["z"]).max() < rounding(results[0]["z"])


def test_errors_are_those_of_the_paper():
    """e as the paper's algorithm has it, from the reference, against x - z."""
    for name in ("I", "heavy ball", "cser_pl", "I top_k"):
        errors = oracle_run(4, name).e.numpy()
        for r, e in zip(plain_run(4), errors, strict=True):
            assert abs((r[name]["x"] - r[name]["z"]) - e).max() < rounding(r[name]["x"])
            assert abs(e).max() > 10 * rounding(r[name]["x"])


def test_both_implementations_are_one_method():
    """Gradients at points that differ by rounding differ a little: 10 times the rounding of the parameters is allowed."""
    for r in plain_run(4):
        assert abs(r["I"]["x"] - r["II"]["x"]).max() < 10 * rounding(r["I"]["x"])
        assert abs(r["I"]["x"] - r["released"]["x"]).max() > 1e-3  # while the released code's is another one
    assert plain_run(4)[0]["I"]["kept"] == {"momentum", "common"}
    assert plain_run(4)[0]["II"]["kept"] == plain_run(4)[0]["released"]["kept"] == {"momentum"}
    assert plain_run(4)[0]["no momentum"]["kept"] == {"common"}


def test_models_are_equal_where_they_must_be():
    results = plain_run(4)
    for name in ("ef_sgd", "ef_sgd released", "ef_sgd top_k", "ef21_sgdm", "ef21_sgdm top_k"):
        assert all((r[name]["x"] == results[0][name]["x"]).all() for r in results)
    for name in ("local_sgd", "qsparse", "csea"):
        assert not (results[1][name]["x"] == results[0][name]["x"]).all()
    # The last step of CSEA averaged one block in 8, and that one is equal on all ranks, bit for bit.
    d = len(results[0]["csea"]["x"])
    chosen = reference_cser.choice(d, 8, BLOCK, seed=SEED, step=STEPS, stream=1).numpy()
    assert all((r["csea"]["x"] == results[0]["csea"]["x"])[chosen].all() for r in results)


@pytest.mark.parametrize("name", CASES)
def test_evaluation_takes_the_mean_of_the_models(name):
    results = [r[name] for r in plain_run(4)]
    mean = reference_cser.mean(torch.stack([torch.from_numpy(r["x"]) for r in results])).numpy()
    same = CASES[name][0] in (EFSGD, EF21SGDM)
    assert all((r["average"] == (r["x"] if same else mean)).all() for r in results)


def expected_bytes(name: str, world: int, step: int, d: int) -> tuple[int, int]:
    """2 (n-1)/n of the chosen elements, rounded up to a multiple of n, 4 bytes each; two collectives make a mean.

    With top_k 8 bytes, value and place, of each to every other rank, in one. After local steps QSparse-local-SGD asks besides
    whether parameters were changed, and CSER at a reset with top_k: a byte to every other rank, in one.
    """
    cls, o = CASES[name]
    draws: list[tuple[int | None, int]] = []  # (ratio, stream)
    if cls is CSER:
        reset = step % o["reset_every"] == 0
        if not (reset and o.get("variant") == "released"):
            draws.append((o["gradient_ratio"], 2))
        if reset:
            draws.append((o["model_ratio"], 1))
    elif cls in (EFSGD, EF21SGDM) or step % o["sync_every"] == 0:
        draws.append((o["ratio"], 0))
    asks = int(cls is QSparseLocalSGD and bool(draws))
    if cls is CSER and o.get("compressor") == "top_k":
        asks = int(step % o["reset_every"] == 0)
    asked = asks * (world - 1)
    if o.get("compressor") == "top_k":
        sizes = [p.numel() for p in toy.make().parameters()]
        kept = [sum(-(-n // r) for n in sizes) for r, _ in draws if r]
        return asked + sum((world - 1) * 8 * k for k in kept), asks + len(kept)
    block = 1 if o.get("compressor") == "random_k" else BLOCK
    chosen = [int(reference_cser.choice(d, r, block, seed=SEED, step=step, stream=s).sum()) for r, s in draws]
    return asked + sum(2 * 4 * (world - 1) * -(-k // world) for k in chosen), asks + sum(2 for k in chosen if k)


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_the_chosen_elements(name):
    for r in plain_run(4):
        d = len(r[name]["x"])
        assert r[name]["sent"] == [expected_bytes(name, 4, step, d) for step in range(1, STEPS + 1)]


def interrupted(rank: int, world: int, ranks: int, cases: dict[str, int]) -> dict[str, list]:
    """For every rank here its states in the end: in one go, and resumed."""

    def ended(made: World) -> list:
        found = []
        for w, optimizer in enumerate(made.optimizers):
            with made.ranks.turn(w):
                x = reference.Layout(made.model).parameters()
                kept = (state(optimizer, s, len(x)) for s in ("momentum", "error", "common", "known"))
                found.append([x.numpy(), *kept])
        return found

    results = {}
    for name, at in cases.items():
        both = resumed(functools.partial(build, name, rank, ranks, **SMALL), at, 24, lr_of)
        results[name] = list(zip(*map(ended, both), strict=True))
        for made in both:
            made.close()
    return results


AT = {"I": 8, "II": 12, "released": 8, "cser_pl": 6, "qsparse": 8, "ef_sgd released": 9, "I top_k": 8, "ef21_sgdm": 9}
"""Within an interval."""


@pytest.mark.parametrize("real", [True, slow(False)])
def test_resumed_equals_uninterrupted_from_within_an_interval(real):
    few = {name: AT[name] for name in ("I", "qsparse", "ef21_sgdm")}
    for result in run_ranks(interrupted, 2, 0, few) if real else run_ranks(interrupted, 1, 3, AT):
        for name, ends in result.items():
            for straight, again in ends:
                assert all((a == b).all() for a, b in zip(straight, again, strict=True)), name


def test_a_nan_on_one_rank_counts_as_no_gradient():
    names, poison = ["I", "II", "released", "qsparse", "ef_sgd", "ef21_sgdm"], (1, 7)
    for w, result in enumerate(really(2, names, poison)):
        for name in names:
            expected = oracle_run(2, name, poison)
            assert (result[name]["x"] == expected.x[w].numpy()).all()
            assert torch.from_numpy(result[name]["x"]).isfinite().all()


@pytest.mark.slow
def test_nodes_as_workers_keep_the_invariants():
    names = ["I", "ef_sgd", "csea", "I top_k", "qsparse top_k"]
    results = really(4, names, ranks_per_node=2, hierarchical=True)
    first = results[0]
    for r in results[1:]:
        assert (r["I"]["z"] == first["I"]["z"]).all()
        assert (r["ef_sgd"]["x"] == first["ef_sgd"]["x"]).all()
    # The sum over 4 ranks in another order: rounding alone, a little amplified by the gradients.
    flat = plain_run(4)[0]["I"]["x"]
    assert abs(first["I"]["x"] - flat).max() < 10 * rounding(flat)
    # What every rank sends to all is added up in rank order in either form: not even rounding differs.
    for ours, theirs in zip(results, plain_run(4), strict=True):
        assert all((ours[name]["x"] == theirs[name]["x"]).all() for name in ("I top_k", "qsparse top_k"))
