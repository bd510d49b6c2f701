"""Records -> tables for the terminal, figures, one HTML page, TensorBoard scalars. Reads the nouns, changes nothing."""
