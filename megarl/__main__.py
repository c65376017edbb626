"""``python -m megarl``."""

from megarl.cli import main

if __name__ == "__main__":  # engine and Ray processes import this module anew
    main()
