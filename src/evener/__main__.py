"""`python -m evener` is the command `evener`; this is also what torchrun starts with `-m evener`."""

from evener.cli.commands import main

if __name__ == "__main__":
    main()
