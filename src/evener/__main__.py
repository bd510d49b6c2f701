"""`python -m evener` is the command `evener`; this is also what torchrun starts with `-m evener`."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is loaded ends it as Ctrl-C does later."""
    try:
        from evener.cli import app
    except KeyboardInterrupt:
        sys.stderr.write("evener: stopped\n")
        sys.exit(130)
    app.main()


if __name__ == "__main__":
    main()
