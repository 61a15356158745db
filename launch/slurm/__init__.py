"""Nodes of a SLURM job."""
