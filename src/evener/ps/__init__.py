"""The star plane: a master, and nodes that connect out to it and may come and go at any step.

    command                    master                                                  node
    -------                    ------                                                  ----
    master_client -- Submit ----> conversation -> submission                              node
                                              employer -> run        -- Prepare ---->  fetches code and data
               <- Accepted --                                        <-- Fetch ------
                                              blobs                -- Chunk ------>  makes its engine
                                              run                    <-- Ready ------
                                              run -> sync.Server     -- Told -------->  employment: works on a lease
                                              landing (bytes), run   <-- Contribution   its gradient, or its progress
               <- News -----  audience        validations            -- Assess ------>
               <- Finished -                                         <-- Assessed ---
                                              settlement             -- Release ----->  forgets the run
                              conversation -> members                <-- Join --------  line, whenever it connects
                                              membership             -- Welcome, Bench, Farewell -->
                              both sides, several times within the patience: Beat

Where to read what: `messages` is the language; `membership` decides who is in, a pure function of time and messages;
`consequences` does what follows; `run` joins the parameter server (`sync`), validation and `ledger`; `keeping` and
`memory` write a run down, so that a master that was killed goes on with it. `node`, `line`, `inbox` and `employment`
are the other side, `thin_engine` and `torch_engine` what computes there.
"""
