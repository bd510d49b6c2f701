"""The master: its nodes, its runs and their results.

There are two kinds of runs, each a shell that the scheduler knows and a core that does the work:

    ActiveLeaseRun   LeaseTraining      the nodes work on leases (an agreement)
    ActiveRankRun    RankTraining    every node has a rank, and the ranks work together
"""
