"""Ways to bring a training: a program of five changed lines, YOLO, and the trainers of other libraries.

A new one on PyTorch's modules, optimizers and loaders is a module in `integrations`, on `programs.run.Run`; any
other is a folder here, on `training.session.TrainingSession`. docs/adding-a-front-end.md goes through both.
"""
