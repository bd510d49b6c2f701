"""A master, and nodes that connect out to it and may come and go at any step; `agreements` has the parameter server.

The messages of a run with an agreement:

    command                   master                                              node
    -------                   ------                                              ----
                              handlers -> nodes, node_rules <-- Join -----------  reconnecting_client, at each connect
                              effects                        -- Welcome ------->  node
    client                    handlers, job
      -- SubmitRun -------->  scheduler -> lease_run         -- Prepare ------->  lease_part: fetches code and data
      <- RunAccepted -------  blob_transfer                  <- FetchBlob ------  blob_fetcher
                              piece_holders                  -- BlobChunk, FetchFrom ->  makes its engine
                              lease_training                 <- Ready ----------
                              lease_training                 -- ServerReply --->  works on a lease
                              handlers (bytes as they come)  <- Contribution ---  its gradient, or its progress
      <- RunEvents ---------  scheduler, validation          -- Validate ------>
                                                             <- Validated ------
      <- RunFinished -------  run_result                     -- Release ------->  the part ends
                              effects                        -- Quarantine, Dismiss ->
                              both sides, several times within the patience: Heartbeat

Modules: `messages` defines the protocol. `node_rules` decides which nodes are members, as a pure function of time and
messages; `effects` carries its decisions out. `lease_training` joins the decisions of the parameter server
(`agreements`), validation and the history. `checkpointing` saves a run, so that a restarted master continues it.
`access` holds rights, names and quotas. `blob` holds the files that are sent. `node` is the other side; its `engine`
computes with a thin or a PyTorch backend. `ranks` holds runs in which each node has one rank (their messages:
`node/rank_part.py`); `examination` belongs to `evener doctor`.
"""
