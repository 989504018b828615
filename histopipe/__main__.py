"""`python -m histopipe`."""

from histopipe.cli import main

if __name__ == "__main__":
    main()
