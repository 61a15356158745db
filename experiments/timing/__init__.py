"""How fast this machine is compared with the cluster that it stands for."""
