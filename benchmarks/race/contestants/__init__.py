"""One file per contestant: what its documentation recommends, in at most 80 lines."""
