"""The oracle: pure functions that say who should do how much and what it will cost. No torch, no sockets, no clock."""
