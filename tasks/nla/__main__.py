"""The commands of task `nla`: `python -m tasks.nla prepare|sft|reconstruct …`, see tasks/nla/prepare.py and warm.py."""

import sys

import transformers

from data import UserError
from tasks.nla.prepare import prepare_command
from tasks.nla.warm import reconstructor_command, verbalizer_command

COMMANDS = {"prepare": prepare_command, "sft": verbalizer_command, "reconstruct": reconstructor_command}
USAGE = "usage: python -m tasks.nla prepare|sft|reconstruct [--help] …"


def main(argv: list[str]) -> None:
    transformers.logging.set_verbosity_error()  # the reconstructor leaves weights of its base out on purpose
    command = argv[0] if argv else ""
    if command in ("-h", "--help"):
        print(USAGE)
        sys.exit(0)
    if command not in COMMANDS:
        print(USAGE, file=sys.stderr)
        sys.exit(2)
    try:
        COMMANDS[command](argv[1:])
    except UserError as error:
        print("error:", error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
