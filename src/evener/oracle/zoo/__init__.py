"""Well-known networks as ModelGraphs, drawn without PyTorch: what `evener plan resnet152` plans for."""
