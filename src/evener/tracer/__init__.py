"""nn.Module -> ModelGraph, by one forward pass on the meta device."""
