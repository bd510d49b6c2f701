"""Records -> tables for the terminal, figures, one HTML page, TensorBoard scalars. Reads records, changes nothing."""
