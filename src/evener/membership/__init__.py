"""A run whose ranks change while it goes on: generations, held outside of the ranks, and how ranks follow them.

rank_supervisor, coordinator   in the command that started local ranks, or at the master: who is lost, and who is next
elastic_group, rendezvous      in a rank: hears of a generation, aborts its connections, meets the others again
resume_point                   the step from which ranks with whole models continue
line_probe, side_channel       a rank that joins: whether it reaches the others, and how it gets the state
"""
