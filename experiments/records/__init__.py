"""One JSON file per run: what it was and what it measured."""
