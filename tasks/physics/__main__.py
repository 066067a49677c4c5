"""The commands of task `physics`: `python -m tasks.physics sft …`, see tasks/physics/warm.py."""

import sys

from tasks.physics.warm import main

if __name__ == "__main__":
    if sys.argv[1:2] != ["sft"]:
        sys.exit("usage: python -m tasks.physics sft --model M --out DIR [flags]")
    main(sys.argv[2:])
