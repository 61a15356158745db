"""What experiments/predict.py is asked: conf/predict with the keys of the command line, checked."""

from __future__ import annotations

import re
from collections.abc import Sequence

from experiments.config import compose, validate
from experiments.config.schema_predict import Question

FOLDER = compose.CONF / "predict"


def ask(overrides: Sequence[str]) -> Question:
    """What key=value pairs ask, with `methods` as a list. Raises UserError for whatever is no key or out of its range."""
    # Hydra would take methods=a,b for two runs, layers=24 of a model for a key, and gpu=4090 for a number.
    typed = [re.sub(r"""^((?:methods|model|gpu)=)(?!\[|"|null$)'?(.+?)'?$""", r'\1"\2"', o) for o in overrides]
    asked = compose.plain(typed, FOLDER)
    validate.check_section(Question, asked)
    found = Question.model_validate(asked)
    if isinstance(found.methods, str):
        found.methods = found.methods.split(",")
    return found
