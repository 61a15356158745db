"""Experiment trackers: Weights & Biases and TensorBoard behind one interface. `start.start` begins a tracked run."""
