"""`python -m jdp`, and the command `jdp`: see `jdp.cli`."""

import sys


def main() -> int:
    """Runs the command; says what to install if what it needs is missing."""
    try:
        from jdp import cli
    except ModuleNotFoundError as error:
        if error.name != "tyro":
            raise
        print("jdp: the command needs tyro: pip install 'jdp-train[cli]'.", file=sys.stderr)
        return 2
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
