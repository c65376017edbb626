"""``python -m megarl``."""

import sys

try:
    from megarl.cli import main
except KeyboardInterrupt:  # nothing to clean up yet
    print("\nstopped by Ctrl-C", file=sys.stderr)
    sys.exit(130)

if __name__ == "__main__":  # engine and Ray processes import this module again
    main()
