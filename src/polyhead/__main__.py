"""`python -m polyhead`: the command line."""

from polyhead.cli import main

if __name__ == "__main__":
    main()
