"""How fast this machine is beside the cluster that it stands for."""
