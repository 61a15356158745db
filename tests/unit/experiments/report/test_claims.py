"""docs/claims.md: a verdict in every row, each from numbers; the page is that of the published records, byte for byte."""

from __future__ import annotations

import math

import pytest
import torch

from birder.predict import METHODS, Cluster, Link
from experiments import claims as command
from experiments.cells import claimed
from experiments.records.record import PUBLISHED, read_all
from experiments.report import claims_measured as measured
from experiments.report import claims_page, replayed
from experiments.report.claims import Claim
from experiments.workloads import cifar_models
from tests.helpers.records import run, score


@pytest.fixture(scope="module")
def rows() -> list[Claim]:
    return claims_page.collect(read_all(PUBLISHED))


def test_the_page_is_that_of_the_records() -> None:
    assert command.PAGE.read_text(encoding="utf-8") == claims_page.text(), "run: make tables"


def test_every_row_says_what_was_run_and_ends_in_a_verdict(rows: list[Claim]) -> None:
    assert {r.kind for r in rows} == {"trained", "replayed", "predicted", "computed", "nothing"}
    for r in rows:
        assert r.text
        assert r.source
        assert (r.run == "") == (r.kind == "nothing") == (r.result == "—")
        assert r.verdict.startswith("cannot be tried here") == (r.kind == "nothing")
    for method in ("Birder", "1-bit Adam", "1-bit LAMB", "0/1 Adam", "CSER", "SLAMB"):
        assert any(r.text.startswith(method) for r in rows), method


def test_the_headline_claims_are_there(rows: list[Claim]) -> None:
    text = "\n".join(r.text for r in rows)
    for words in (
        *("up to 2.5 times", "up to 6.3 times", "nearly 10 times", "4.5 times"),
        *("0.5 of the state of the art", "90 % efficiency to 1,024", "up to 87 %", "up to 54 %", "up to 2 times"),
    ):
        assert words in text, words


def test_numbers_of_replayed_rows_are_those_of_the_records(rows: list[Claim]) -> None:
    from experiments.cells import suite

    results = replayed.collect(suite.load("paper"), read_all(PUBLISHED))
    best = [
        results.best(setting, "birder_hierarchical")
        for setting in results.settings()
        if setting[0].startswith("resnet50")
    ]
    found = [b for b in best if b is not None]
    (row,) = [r for r in rows if r.kind == "replayed" and "ResNet-50" in r.text]
    assert f"{min(found):.2f}x to {max(found):.2f}x" in row.result


def test_a_verdict_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="a verdict begins with one of confirmed, not reached, cannot be tried here"):
        Claim("x", "y", "trained", "z", "1", "probably")


def test_verdicts_follow_the_numbers() -> None:
    """The same task with other results gives other verdicts."""

    def verdict(birder: float) -> str:
        records = [score("Birder", birder, 0, 0.1, exp="methods"), score("SGDM fp32", 90.0, 0, 0.1, exp="methods")]
        row = measured.same_accuracy(records, "x", "y", "Birder", ("SGDM fp32",), (0,))
        assert row is not None
        assert f"{birder:.2f} against 90.00" in row.result
        return row.verdict

    assert verdict(89.2).startswith("confirmed within 1 % on Fashion-MNIST")
    assert verdict(95.0).startswith("confirmed")
    assert verdict(89.0).startswith("not reached on Fashion-MNIST (89.00 against 90.00")
    fast = [run("SGDM fp32", 100.0, cluster="emulated"), run("Birder", 30.0, cluster="emulated")]
    slow = [run("SGDM fp32", 100.0, cluster="emulated"), run("Birder", 90.0, cluster="emulated")]
    found = [measured.birder_trained(r) for r in (fast, slow)]
    begin = [row.verdict.partition(" on emulated links")[0] for row in found if row is not None]
    assert begin == ["confirmed with 4 nodes of one rank", "not reached"]
    assert measured.birder_trained([]) is None


def test_of_several_settings_that_with_most_seeds_is_quoted() -> None:
    def pairs(nodes: int, birder: float, seeds: int) -> list:
        methods = {"Birder": birder, "SGDM fp32": 90.0 + nodes}
        return [
            score(m, value, seed, 0.1, exp="methods", nodes=nodes, id=f"{m}-{nodes}-{seed}".replace(" ", ""))
            for m, value in methods.items()
            for seed in range(seeds)
        ]

    for records in ([*pairs(2, 80.0, 1), *pairs(8, 98.0, 2)], [*pairs(8, 98.0, 2), *pairs(2, 80.0, 1)]):
        row = measured.same_accuracy(records, "x", "y", "Birder", ("SGDM fp32",), (0,))
        assert row is not None
        assert "98.00 ± 0.00 against 98.00 ± 0.00 (SGDM fp32), n = 2" in row.result


def test_check_tells_another_page(tmp_path, capsys) -> None:
    assert command.main(["--check"]) == 0
    (tmp_path / "claims.md").write_text("old")
    assert command.main(["--check", "--out", str(tmp_path / "claims.md")]) == 1
    assert "python experiments/claims.py" in capsys.readouterr().out


# ---- the predictions --------------------------------------------------------------------------------------------------


def test_shapes_are_those_of_the_models() -> None:
    with torch.device("meta"):
        wrn = cifar_models.build("wrn_40_8", 3, 100)
    assert sum(math.prod(s) for _, s in claimed.wrn_40_8()) == sum(p.numel() for p in wrn.parameters())
    assert round(sum(math.prod(s) for _, s in claimed.bert_xl()) / 1e9, 1) == 2.8


def test_the_slowest_gpu_is_the_one_with_just_this_speedup() -> None:
    assert claimed.slowest(3.0, lambda c: (c + 100) / (c + 10)) == pytest.approx(35.0)  # (c + 100) = 3 (c + 10)
    assert claimed.slowest(20.0, lambda c: (c + 100) / (c + 10)) is None
    (need,) = claimed.cser_needs(claimed.wrn_40_8(), 4.0, [(64, 4, 16)], half=False)
    assert need is not None
    t = claimed.even("x", "v100", claimed.wrn_40_8(), need)
    cluster = Cluster(8, 1, Link(10.0, claimed.LATENCY_US))
    speedup = claimed.ms(t, cluster, METHODS["fp32"]) / claimed.ms(t, cluster, claimed.cser(64, 4, 16))
    assert speedup == pytest.approx(4.0, rel=1e-6)


def test_cser_sends_its_ratio() -> None:
    """Bytes of the mean step: 1/R_C of an fp32 all-reduce."""
    from birder.predict import Costs, simulate

    t = claimed.even("x", "v100", claimed.wrn_40_8(), 10.0)
    cluster = Cluster(8, 1, Link(10.0))
    dense = simulate(t, cluster, METHODS["fp32"], Costs()).nic_bytes
    for setting, r in (((64, 4, 16), 32), ((512, 8, 64), 256), ((2048, 16, 128), 1024)):
        assert dense / simulate(t, cluster, claimed.cser(*setting), Costs()).nic_bytes == pytest.approx(r, rel=1e-6)


def test_whole_runs_of_bert_large_are_means_over_their_steps() -> None:
    cluster = Cluster(16, 4, Link(2.7), inside=Link(1e6))
    dense = claimed.bert_large_run(cluster, 1000, 1000, (0, 1000, 0))
    assert dense.onebit == pytest.approx(dense.adam)  # dense to the end
    none = claimed.bert_large_run(cluster, 1000, 0, (0, 1000, 0))
    assert none.zero_one == pytest.approx(none.onebit)  # a 1-bit round in every step
    assert claimed.bert_large_run(cluster, 1000, 0, (0, 500, 500)).zero_one < none.zero_one


def test_efficiency_is_one_where_nothing_has_to_be_waited_for() -> None:
    assert claimed.efficiency("none", 1000.0) == 1.0
    assert claimed.efficiency("bf16", 1000.0) < claimed.efficiency("slamb", 1000.0) <= 1.0
