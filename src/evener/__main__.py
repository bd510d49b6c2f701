"""`python -m evener` is the command `evener`; this is also what torchrun starts with `-m evener`."""

import sys


def main() -> None:
    """Run the command line; signals that stop it while it is loaded end it as they do later."""
    try:
        from evener.system.signals import interrupt_on_stop_signals, outlive_terminal

        outlive_terminal()
        with interrupt_on_stop_signals():
            from evener.cli import app

            app.main()
    except KeyboardInterrupt:
        sys.stderr.write("evener: stopped\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
