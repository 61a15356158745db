"""What is said of a suite's cells: what their numbers are not, how rounds came about, what they decide. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from birder.predict.timeline import Timeline
from experiments.cells.suite import Place
from experiments.cells.timelines import BUCKET_MB, bucket_delay_ms, nic_bytes
from experiments.report import arithmetic, captions, published
from experiments.report.arithmetic import WIRES, WITHIN, Check
from experiments.report.formats import number, percent, times
from experiments.report.metrics import FASTER, LEAST_ROUNDS, OPEN, SLOWER
from experiments.report.replayed import Results
from experiments.report.sentences import say
from experiments.report.table import Note, Table
from experiments.training import machine

Best = tuple[float, Place, str]
"""The largest speedup of a setting over its numbers of nodes, where, and over which baseline."""


def caveats(results: Results) -> str:
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
    clauses = [clause for clause in suite.report.caveats if not any(key in clause for key in lacking)]
    return f"{suite.report.summary}: " + "; ".join(clauses).format(**known)


def _range(values: Iterable[float | None], shown: Callable[[float], str] = number) -> str:
    known = sorted(v for v in values if v)
    return " to ".join(dict.fromkeys([shown(known[0]), shown(known[-1])])) if known else ""


def share(fraction: float) -> str:
    """1/48."""
    return "1" if fraction == 1 else f"1/{1 / fraction:.3g}"


def rounds(results: Results) -> list[Note]:
    """How methods were compared, and what makes it doubtful."""
    compared = [r for c, r in results.records.items() if c.nodes > 1]
    if not compared:
        return []
    timed = [r for r in compared if r.turns]
    steps = _range([r.timing["steps"] for r in compared if not r.turns], str)
    alone = Note(say("replay_alone", steps=steps, cells=len(compared), timed=len(timed)))
    if not timed:
        return [alone]
    counts = [len(r.turns["ms"]) for r in timed]
    summary = say(
        "replay_rounds",
        counts=_range(counts, str),
        fewest=LEAST_ROUNDS if max(counts) < LEAST_ROUNDS else None,
        rebuilt=sum(r.turns["held"] == "one" for r in timed),
        cells=len(timed),
    )
    said = [Note(summary)] + [alone] * (len(timed) < len(compared))
    worlds = {r.turns["world"]: r.turns for r in timed}.values()
    busy = [about for about in worlds if machine.is_busy(about["busy"])]
    if busy:
        worst = max(busy, key=lambda about: about["busy"]["others"] + about["busy"]["steal"])
        caution = captions.caution(worst)
        said.append(Note(say("replay_busy", busy=len(busy), worlds=len(worlds), caution=caution), "caution"))
    return said


# ---- which assumptions give the published factor, who is fastest, whether to compress at all --------------------------


def headline(results: Results, model: str) -> tuple[str, float | None]:
    """(sentence, factor) of the paper for a model's architecture."""
    for e in published.load():
        ours = e.get("kind") == "speedup" and results.suite.models[model].published in e.get("exps", ())
        if ours and isinstance(e["value"], int | float):
            return f"{e['quantity']}: {e['value']:g}x ({e['source']}; {e['status']})", float(e["value"])
    return "", None


def against_published(results: Results) -> Iterator[tuple[str, str, float, list[Best]]]:
    """(architecture, the paper's sentence, its factor, the best over nodes of every setting), of what has been measured."""
    suite = results.suite
    for architecture, model in {suite.architecture(m): m for m in results.models}.items():
        quoted, factor = headline(results, model)
        found: list[Best] = []
        for setting in (s for s in results.settings() if suite.architecture(s[0]) == architecture):
            for base in ("fp32", "bf16"):
                if best := results.best(setting, suite.report.ours, base):
                    found.append((*best, base))
        if factor is not None and found:
            yield architecture, quoted, factor, found


def placed(results: Results) -> list[dict[str, str]]:
    """For each architecture and baseline: the range of the best factors over all assumptions, and where the paper's lies."""
    said = []
    for model, _, factor, found in against_published(results):
        for wire in dict.fromkeys(base for *_, base in found):
            best = sorted(value for value, _, base in found if base == wire)
            outside = "below all of them" if factor < best[0] else "above all of them"
            where = "between them" if best[0] <= factor <= best[-1] else outside
            known = {"factor": times(factor), "least": times(best[0]), "most": times(best[-1])}
            said.append({"model": model, "wire": wire, "where": where, **known})
    return said


def reproduced(results: Results) -> list[str]:
    """For each architecture, which assumptions give the paper's factor and which do not, from the numbers."""
    suite, said = results.suite, []
    for _, quoted, factor, every in against_published(results):
        found: list[captions.Found] = []
        for value, place, base in every:
            link = f"{suite.links[place.link].gbit:g} Gbit/s"
            where = f"{suite.models[place.model].short}, {suite.rate(place)}, {link}, against {base}"
            found.append((value, where, results.versus(place, suite.report.ours, base)))
        # How far off in either direction: half of a factor is as far from it as twice.
        ordered = sorted(found, key=lambda f: (max(f[0] / factor, factor / f[0]), f[1]))
        close, below, above = captions.by_factor(factor, found)
        shown = {"near": [f for f in ordered if f in close], "nearest": ordered[:1], "below": below, "above": above}
        listed = {name: "; ".join(f"{where} ({text})" for _, where, text in some) for name, some in shown.items()}
        said.append(say("factor", quoted=quoted, within=percent(captions.NEAR), **listed))
    return said


def fastest(results: Results) -> list[str]:
    """For every place, whether the suite's own method is the fastest compressed one; on loopback, whether to compress."""
    return [said for place in results.places() for said in _fastest(results, place)]


def _fastest(results: Results, place: Place) -> Iterator[str]:
    suite, ours = results.suite, results.suite.report.ours
    where = f"{place.model}, {suite.links[place.link].title}, {place.nodes} nodes"
    ranking, own, bound = results.fastest(place), results.ms(place, ours), results.ms(place, "none")
    if own is not None and len(ranking) > 1:
        apart = own / bound - 1 if bound else 0.0
        side = f"{abs(100 * apart):.0f} % {'above' if apart >= 0 else 'below'} the bound without communication"
        ms, name = next((ms, name) for ms, name in ranking if name != ours)
        label, rival = suite.methods[ours].label.partition(" (")[0], suite.methods[name].label
        found = results.compared(place, ours, name)
        verdict, about = OPEN if found is None else found.verdict, side if bound else ""
        yield f"{where}: {say('rival', own=label, ms=own, verdict=verdict, rival=rival, rival_ms=ms, about=about)}"
    if suite.links[place.link].goodput_mbit is None and ranking:
        name = ranking[0][1]
        if (found := results.compared(place, "fp32", name)) is not None:
            longer = f"takes {found.value:.2f}{found.between()} times as long as fp32 DDP"
            advice = {FASTER: "do not compress: ", OPEN: "not decided whether to compress: ", SLOWER: ""}[found.verdict]
            yield f"{where}: {advice}{suite.methods[name].label}, the fastest compressed method, {longer}."


# ---- whether the replay keeps time: dense steps against arithmetic ----------------------------------------------------


def expected(
    t: Timeline, nodes: int, gbit_per_s: float, wire: str = "fp32", *, overlap: bool = True, delay: bool = True
) -> float:
    """A dense step, in ms: the largest of (ready + remaining bytes/rate) over DDP's buckets; without overlap compute +
    bytes/rate. delay: of the part inside a node of many GPUs."""
    sent = nic_bytes(wire, t.elements, nodes, t.gpus_per_node) * 8 / (gbit_per_s * 1e6)
    step = arithmetic.last(t, sent, bucket_mb=BUCKET_MB) if overlap else t.step_ms + sent
    return step + delay * bucket_delay_ms(t)


def checks(results: Results) -> list[Check]:
    """Every cell of fp32 and bf16 DDP over a link of a set rate; ms of the cluster's clock."""
    found, suite = [], results.suite
    for cell, r in sorted(results.records.items(), key=lambda item: suite.id(item[0])):
        method = suite.methods[cell.method]
        goodput = suite.links[cell.link].goodput_mbit if cell.link is not None else None
        if cell.nodes == 1 or goodput is None or method.wire not in WIRES:
            continue
        how = {"overlap": not method.one_bucket, "delay": suite.gpus_per_node > 1}
        ms = expected(suite.timeline(cell.model, cell.rate), cell.nodes, goodput / 1000, method.wire, **how)
        gbit = suite.links[str(cell.link)].gbit
        where = f"{cell.nodes} nodes, {cell.link if gbit is None else f'{gbit:g} Gbit/s'}"
        sends = f"{method.wire}, {'with' if how['overlap'] else 'without'} overlap"
        name = ", ".join(filter(None, [cell.model, suite.rate(cell), where, sends]))
        found.append(Check(name, results.clock(cell), ms, arithmetic.off_by(r)))
    return found


def check_table(results: Results) -> Table:
    """The check, one line for each cell, and what it found."""
    head = ("fp32 and bf16 DDP", "replayed, ms", "arithmetic, ms", "difference")
    found = checks(results)
    cells = [(c.name, number(c.measured), number(c.expected), f"{c.difference:+.1%}") for c in found]
    worst = max(found, key=lambda c: abs(c.difference), default=None)
    said = say("check", checks=found, worst=worst, within=WITHIN, missed=arithmetic.missed(found))
    return Table.text(head, cells, footnotes=(Note(said, "strong"),))
