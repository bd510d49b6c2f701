"""Well-known networks as ModelGraphs, built without PyTorch: `evener plan resnet152` plans for them."""
