"""What step times say: which assumptions give the published factor, who is fastest, whether to compress at all."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.cells.suite import Place
from experiments.report import captions, published
from experiments.report.formats import between, percent
from experiments.report.metrics import FASTER, OPEN, SLOWER
from experiments.report.replayed import Results
from experiments.report.sentences import say


def headline(results: Results, model: str) -> tuple[str, float | None]:
    """(sentence, factor) of the paper for a model's architecture."""
    for e in published.load():
        ours = e.get("kind") == "speedup" and results.suite.models[model].published in e.get("exps", ())
        if ours and isinstance(e["value"], int | float):
            return f"{e['quantity']}: {e['value']:g}x ({e['source']}; {e['status']})", float(e["value"])
    return "", None


def reproduced(results: Results) -> list[str]:
    """For each architecture, which assumptions give the paper's factor and which do not, from the numbers."""
    suite, said = results.suite, []
    for architecture, model in {suite.architecture(m): m for m in results.models}.items():
        quoted, factor = headline(results, model)
        found: list[captions.Found] = []
        for setting in results.settings():
            for base in ("fp32", "bf16"):
                best = results.best(setting, suite.report.ours, base)
                if best is not None and suite.architecture(setting[0]) == architecture:
                    rate, link = suite.rates.get(setting[1] or ""), suite.links[setting[2]].gbit
                    where = f"{suite.models[setting[0]].short}, {rate}, {link:g} Gbit/s, against {base}"
                    found.append((best[0], where, results.versus(best[1], suite.report.ours, base)))
        if factor is not None and found:
            said.append(_reproduced(quoted, factor, found))
    return said


def _reproduced(quoted: str, factor: float, found: list[captions.Found]) -> str:
    # How far off in either direction: half of a factor is as far from it as twice.
    ordered = sorted(found, key=lambda f: (max(f[0] / factor, factor / f[0]), f[1]))
    close, below, above = captions.by_factor(factor, found)
    near = [f for f in ordered if f in close]
    shown = {"near": near, "nearest": ordered[:1], "below": below, "above": above}
    listed = {name: "; ".join(f"{where} ({text})" for _, where, text in some) for name, some in shown.items()}
    return say("factor", quoted=quoted, within=percent(captions.NEAR), **listed)


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
        yield f"{where}: {captions.beside(label, own, rival, ms, found, side if bound else '')}"
    if suite.links[place.link].goodput_mbit is None and ranking:
        name = ranking[0][1]
        if (found := results.compared(place, "fp32", name)) is not None:
            at = found.interval
            longer = f"takes {found.value:.2f}{between(at.low, at.high) if at else ''} times as long as fp32 DDP"
            advice = {FASTER: "do not compress: ", OPEN: "not decided whether to compress: ", SLOWER: ""}[found.verdict]
            yield f"{where}: {advice}{suite.methods[name].label}, the fastest compressed method, {longer}."
