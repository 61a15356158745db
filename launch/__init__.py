"""Ways to start the ranks of a run: one file per kind of cluster, found through `_target_` in conf/cluster/*.yaml."""
