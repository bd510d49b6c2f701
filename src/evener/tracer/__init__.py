"""Tracing of an nn.Module: its operations with their costs, by one pass on the meta device, and its ModelGraph."""
