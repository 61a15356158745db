"""What is trained: one file per workload, found through `_target_` in conf/workload/*.yaml."""
