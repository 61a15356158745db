"""What is said above the page of a suite: what its numbers are not, and how its rounds came about. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from experiments.report import captions
from experiments.report.formats import number
from experiments.report.metrics import LEAST_ROUNDS
from experiments.report.replayed import Results
from experiments.report.sentences import say
from experiments.training import machine


def honesty(results: Results) -> str:
    """What these numbers are not. A clause that names what is not known falls away."""
    suite, records = results.suite, results.records.items()
    loopback = [name for name, link in suite.links.items() if link.goodput_mbit is None]
    links = [r.link for c, r in records if c.link not in loopback]
    shares = sorted({r.config[suite.name]["fraction"] for _, r in records})
    known = {
        "rates": ", ".join(number(rate) for rate in sorted({at.get("set_mbit_per_s") or 0 for at in links}) if rate),
        "goodputs": _range([r.link["mbit_per_s"] for c, r in records if c.nodes > 1]),
        "slower": _range([at["dilation"] for at in links]),
        "shares": ", ".join(dict.fromkeys(map(share, shares))),
        "loopback": "loopback" if any(c.link in loopback for c, _ in records) else "",
    }
    lacking = [f"{{{key}}}" for key, value in known.items() if not value]
    clauses = [clause for clause in suite.report.honesty if not any(key in clause for key in lacking)]
    return f"{suite.report.summary}: " + "; ".join(clauses).format(**known)


def _range(values: Iterable[float | None], shown: Callable[[float], str] = number) -> str:
    known = sorted(v for v in values if v)
    return " to ".join(dict.fromkeys([shown(known[0]), shown(known[-1])])) if known else ""


def share(fraction: float) -> str:
    """1/48."""
    return "1" if fraction == 1 else f"1/{1 / fraction:.3g}"


def rounds(results: Results) -> list[tuple[str, bool]]:
    """Sentences about how methods were compared, and whether each is a caution."""
    compared = [r for c, r in results.records.items() if c.nodes > 1]
    if not compared:
        return []
    timed = [r for r in compared if r.turns]
    others = f"{len(compared) - len(timed)} of the {len(compared)} cells" if timed else "The cells"
    steps = _range([r.timing["steps"] for r in compared if not r.turns], str)
    alone = (
        f"{others} on more than one node were measured one after the other, {steps} steps each: no interval is known."
    )
    if not timed:
        return [(alone, False)]
    counts = [len(r.turns["ms"]) for r in timed]
    told = say(
        "replay_rounds",
        counts=_range(counts, str),
        fewest=LEAST_ROUNDS if max(counts) < LEAST_ROUNDS else None,
        anew=sum(r.turns["held"] == "one" for r in timed),
        cells=len(timed),
    )
    said = [(told, False)] + [(alone, False)] * (len(timed) < len(compared))
    worlds = {r.turns["world"]: r.turns for r in timed}.values()
    busy = [about for about in worlds if machine.is_busy(about["busy"])]
    if busy:
        worst = max(busy, key=lambda about: about["busy"]["others"] + about["busy"]["steal"])
        where = f"In {len(busy)} of {len(worlds)} comparisons other programs were at work; at worst: "
        said.append((where + str(captions.caution(worst)), True))
    return said
