"""Studies that made a part of a page once, and make it again: run them as scripts, `python studies/NAME.py --help`."""
