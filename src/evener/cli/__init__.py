"""The command line: parse, call one function, print. PyTorch is imported only by what needs it."""
