"""Who takes part: the processes of a run on this machine or under torchrun, and the watch over them."""
