"""What runs at the master: who is here, which runs go on, and what becomes of them."""
