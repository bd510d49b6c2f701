"""A run whose ranks change while it goes on: generations, held outside of the ranks, and how ranks follow them."""
