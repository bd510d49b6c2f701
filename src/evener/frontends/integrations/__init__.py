"""Trainers that people have already, on nodes of unequal strength: Lightning, Fabric, Hugging Face."""
