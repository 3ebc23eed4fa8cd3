"""`python -m qualms`: the same as the `qualms` command."""

from qualms.entry import main

if __name__ == "__main__":
    main()
