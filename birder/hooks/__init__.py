"""How gradients of DDP, FSDP2 and virtual ranks reach an optimizer: hooks, and the checks that all ranks agree."""
