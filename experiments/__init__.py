"""The harness: describes, runs, records and compares experiments. Imports `birder`, is never imported by it."""

from __future__ import annotations

import birder

if "attach" not in getattr(birder, "__all__", ()):
    raise ImportError(
        f"{birder.__file__} is not birder-repro's: the PyPI package 'birder' is another project; run pip uninstall birder, "
        "then install this one again (make setup)"
    )
