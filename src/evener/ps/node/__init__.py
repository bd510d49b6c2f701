"""A node: joins a master, prepares for runs and computes, with PyTorch or without.

node, node_part           the process of `evener join`: its main thread serves the master; other threads beat and send
lease_part, engine        runs with an agreement: computed in that process, which loads the task and PyTorch for them
rank_part, rank_child     runs of ranks: a process for each, forked by a server that is this one's child, in which
                          `commands.node_rank.run_node_rank` runs; messages are passed on
blob_fetcher              code and data of a run, from the master and from other nodes (piece_exchange: threads)
node_examination          questions of `evener doctor`

With `--sandbox` all of this is a child inside bwrap (`commands.sandbox`).
"""
