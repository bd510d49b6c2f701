"""Integrations of existing trainers: Lightning, Fabric and Hugging Face; `reductions` has what a further one needs."""
