"""One run: the worker, the training loop, and what it measures and writes."""
