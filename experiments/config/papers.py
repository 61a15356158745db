"""The comparisons of one paper, as data: conf/paper/*.yaml. Its experiments at quick scale, then the same methods on a real
task that needs no download.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.config import compose
from experiments.config.data_files import DataFiles, PlainData


class Part(PlainData):
    """One comparison.

    exp: its experiment. overrides: what it has by default. methods: optimizers to keep, None for all. accuracy: it is
    there for accuracies alone, and left out where the paper's own experiments give them.
    """

    exp: str
    overrides: tuple[str, ...] = ()
    methods: tuple[str, ...] | None = None
    accuracy: bool = False

    def given(self, overrides: Sequence[str]) -> list[str]:
        """All overrides of the part: its own, but for what the user has given."""
        return [f"+exp={self.exp}", *compose.unless_given(self.overrides, overrides), *overrides]

    def kept(self, overrides: Sequence[str], methods: Sequence[str] | None) -> list[str]:
        """The optimizers that are to be run: the part's, or those of them that the user names. Raises UserError."""
        every = [o for variant in compose.compared(compose.compose(self.given(overrides))) for o in variant]
        known = dict.fromkeys(o.partition("=")[2] for o in every if o.startswith("optimizer="))
        return [m for m in known if (self.methods is None or m in self.methods) and (methods is None or m in methods)]


class Paper(PlainData):
    """All comparisons of a paper."""

    parts: tuple[Part, ...]

    def asked(self, overrides: Sequence[str]) -> list[Part]:
        """What is to be run. With the user's data, or at paper scale, the paper's experiments measure accuracy themselves."""
        whole = any(o == "scale=paper" or o.startswith("data.path=") for o in overrides)
        return [p for p in self.parts if not (whole and p.accuracy)]


FILES = DataFiles("paper", Paper)
names, load = FILES.names, FILES.load
