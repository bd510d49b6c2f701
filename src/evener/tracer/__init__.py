"""nn.Module -> its operations with their costs, by one forward pass on the meta device; ModelGraph from these."""
