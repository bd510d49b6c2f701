"""Integrations of existing trainers: Lightning, Fabric and Hugging Face."""
