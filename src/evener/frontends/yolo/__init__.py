"""YOLO on nodes of unequal strength: Ultralytics' own trainer, whose every batch is that of all nodes together."""
