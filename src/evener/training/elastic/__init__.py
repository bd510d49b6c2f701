"""Elastic runs, which continue when nodes leave or join: loop, state, and state transfer.

loop                      generations and steps; begin here
replicated, divided       the state of a generation, for whole models and for divided ones
start, plan, loss_events  who enters late, the plan of the present ranks, and what the user is shown
"""
