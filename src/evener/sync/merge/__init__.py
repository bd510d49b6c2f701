"""Three ways to merge the states of several workers into their mean; benchmarks/merging.py compares them."""
