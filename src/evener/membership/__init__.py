"""A run whose ranks change while it goes on: generations, held outside of the ranks, and how ranks follow them.

rank_supervisor, coordinator   in the process that started the ranks: who is lost, and who is in the next generation
elastic_group, rendezvous      in a rank: hears of a generation, aborts its connections, meets the others again
resume_point                   the step from which all continue
line_probe, side_channel       a rank that joins: whether it reaches the others, and how it gets the state
"""
