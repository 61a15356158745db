"""Rounds and volume of 0/1 Adam over whole runs, and the table made of them."""

from __future__ import annotations

import pytest
import torch

from birder.optim import zero_one_schedule as schedule
from experiments.records.record import ROOT
from experiments.report import volume
from launch.errors import UserError
from studies import volume as cli
from tests.helpers.commands import refused
from tests.helpers.reference_zero_one_adam import ZeroOneAdam as Reference

SETTING = volume.VolumeSchedules()


def counts(steps: int, aligned: bool) -> tuple[int, int, int]:
    r = SETTING.rounds(steps, aligned)
    return r.dense, r.onebit, r.skipped


def test_rounds_of_the_reference_implementation():
    """By its counters, written out: a round of either kind or none in every step."""
    gap = interval = 1
    done = passed = dense = onebit = skipped = 0
    for step in range(1, 118_001):
        if step <= 12_500:
            full = step % gap == 0
            dense, onebit, done = dense + full, onebit + (not full), done + full
            if done == 16:
                done, gap = 0, 2 * gap
            continue
        onebit, skipped = onebit + (step % interval == 0), skipped + (step % interval != 0)
        passed += 1
        if passed == 32_678:
            passed, interval = 0, min(16, 2 * interval)
    assert counts(118_000, True) == (dense, onebit, skipped) == (153, 70_467, 47_380)
    assert sum(counts(118_000, True)) == 118_000


def test_rounds_of_the_published_rule():
    # Variance: 1, then 16 gaps each of 1, 2, 4, ..., 256, and of 512 as many as end by step 12,500.
    before = 1 + 16 * (2**9 - 1)
    dense = 1 + 16 * 9 + (12_500 - before) // 512
    # Syncs: every step until 12,500 + 32,678; then every 2nd, 4th, 8th step. 32,678 is 2 mod 4: the third phase begins
    # with the first sync at or after its nominal begin, and so does the fourth.
    ends = [12_500 + 32_678, 12_500 + 2 * 32_678, 110_536]
    onebit = ends[0] + 32_678 // 2 + -(-32_678 // 4) + (118_000 - ends[2]) // 8
    assert counts(118_000, False) == (dense, onebit, 118_000 - onebit) == (153, 70_620, 47_380)
    assert schedule.sync_phases(12_500, 32_678, 16) == (
        (12_500, 1),
        (ends[0], 2),
        (ends[1], 4),
        (ends[2], 8),
        (143_216, 16),
    )


@pytest.mark.parametrize("aligned", [False, True])
def test_rounds_by_counting(aligned: bool):
    """Closed forms against the reference's counters, with a limit that is no power of two as well."""
    for warmup, kappa, doubling, limit in ((12, 3, 11, 4), (40, 1, 7, 16), (1, 1, 1, 16), (9, 16, 5, 6), (7, 2, 3, 1)):
        setting = volume.VolumeSchedules(kappa, warmup, doubling, limit)
        oracle = Reference(
            torch.zeros(1), 1, warmup=warmup, kappa=kappa, doubling=doubling, limit=limit, deepspeed=aligned
        )
        counted = {"variance": 0, "onebit": 0, "sync": 0}
        for step in range(1, 200):
            oracle.steps = step
            oracle.rounds_now()
            counted = {name: counted[name] + oracle.had[name] for name in counted}
            wanted = volume.RoundCounts(step, counted["variance"], counted["onebit"], step - counted["sync"])
            assert setting.rounds(step, aligned) == wanted


def test_the_known_reductions():
    r = SETTING.rounds(118_000, True)
    assert volume.against_adam(r, 16) == pytest.approx(25.9, abs=0.05)
    assert volume.against_onebit_adam(r, 23_000, 16) == pytest.approx(0.843, abs=5e-4)
    assert volume.bits(r, 16) / r.steps == pytest.approx(0.618, abs=5e-4)
    r = SETTING.rounds(152_511, True)
    assert volume.against_adam(r, 16) == pytest.approx(31.8, abs=0.05)
    assert volume.against_onebit_adam(r, 23_000, 16) == pytest.approx(0.846, abs=5e-4)
    assert volume.rounds_saved(r) == pytest.approx(0.512, abs=5e-4)


def test_volume_by_hand():
    r = volume.RoundCounts(steps=100, dense=5, onebit=60, skipped=40)
    assert volume.bits(r, 16) == 5 * 16 + 60
    assert volume.against_adam(r, 32) == 3200 / (5 * 32 + 60)
    assert volume.onebit_adam_bits(100, 20, 16) == 20 * 16 + 80
    assert volume.onebit_adam_bits(10, 20, 16) == 160  # a run that ends within the dense steps
    assert volume.rounds_saved(r) == 0.4


def test_every_published_number_stands_beside_what_comes_nearest():
    table = cli.compared(SETTING, [118_000, 152_511])
    rows, sentences = table.rows, table.footnotes[0].text.splitlines()
    assert {len(r) for r in rows} == {len(table.columns)}
    assert [r[0] for r in rows] == ["87 %"] * 4 + ["54 %", "26x"] + ["90 %"] * 4
    assert all("; verified)" in s or "; unverified)" in s for s in sentences)
    assert "54 % (0/1 Adam, ICLR 2023, abstract; verified). Nearest here: 51.2 %" in sentences[1]
    # 1 - 47,380/118,000 of the steps communicate; the share without grows from there to 15/16.
    (length,) = (int(r[-1].replace(",", "")) for r in rows if r[0] == "54 %")
    for steps, enough in ((length - 100, False), (length, True)):
        assert (volume.rounds_saved(SETTING.rounds(steps, False)) >= 0.54) is enough


def test_the_committed_table_is_what_the_program_makes():
    made = cli.markdown(SETTING, [118_000, 152_511])
    assert (ROOT / "results/published" / cli.TABLE).read_text(encoding="utf-8") == made


def test_the_command(tmp_path, capsys):
    assert cli.main(["--steps", "1000", "--freeze", "100", "--doubling", "50", "--results", str(tmp_path)]) == 0
    written = (tmp_path / cli.TABLE).read_text(encoding="utf-8")
    assert "| as published | 1,000 |" in written
    printed = " ".join(capsys.readouterr().out.split())
    assert "Computed from the schedule, nothing was run." in printed
    assert "│ as published │ 1,000 │" in printed
    assert "Nearest here: " in printed
    assert cli.main(["--steps", "1000", "--print-only", "--results", str(tmp_path / "none")]) == 0
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--steps", "x"], ["--kappa", "0"], ["--limit", "-1"]])
def test_bad_input_is_one_line(arguments, capsys):
    with pytest.raises(UserError, match=f"^{arguments[0]} must be"):
        cli.parse(arguments)
    refused(cli.main, arguments, f"{arguments[0]} must be", capsys)
