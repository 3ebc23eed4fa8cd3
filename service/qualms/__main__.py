"""`python -m qualms` is the `qualms` command."""

from qualms.cli import main

if __name__ == "__main__":
    main()
