"""The parameter server: a master, and nodes that connect out to it and may come and go at any step.

    command                   master                                              node
    -------                   ------                                              ----
                              handlers -> nodes, membership <-- Join -----------  reconnecting_client, at each connect
                              effects                        -- Welcome ------->  node
    master_client             handlers, job
      -- SubmitRun -------->  scheduler -> lease_run         -- Prepare ------->  worker_session: fetches code and data
      <- RunAccepted -------  blob_transfer                  <- FetchBlob ------
                                                             -- BlobChunk ----->  makes its engine
                              training_run                   <- Ready ----------
                              training_run -> sync.Server    -- ServerReply --->  works on a lease
                              handlers (bytes as they come)  <- Contribution ---  its gradient, or its progress
      <- RunEvents ---------  scheduler, validation          -- Validate ------>
                                                             <- Validated ------
      <- RunFinished -------  results                        -- Release ------->  the session ends
                              effects                        -- Quarantine, Dismiss ->
                              both sides, several times within the patience: Heartbeat

Where to read what: `messages` is the language; `membership` decides who is in, a pure function of time and messages;
`effects` does what follows; `training_run` joins the server's decisions (`sync`), validation and the history;
`checkpointing` writes a run down, so that a master that was killed goes on with it. `access` says who may come, and as
what; `blobs` are files that travel; `node` is the other side, whose `engine` computes over a thin or a PyTorch backend;
`collective` are runs of which a node has one rank; `examination` is the doctor's.
"""
