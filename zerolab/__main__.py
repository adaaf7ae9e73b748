"""The command line: ``python -m zerolab COMMAND``.

Each command lives in the module that does the work, as ``add_arguments(parser)`` and ``run(args)``, which
returns the exit code; that module is imported only when its command is asked for, so ``plan`` answers
without loading torch.
"""

import argparse
import difflib
import importlib
import sys
from typing import NoReturn

import zerolab

COMMANDS = {
    "plan": ("zerolab.plan", "what fits on your GPUs at each stage, and why not"),
    "verify": ("zerolab.parity.parity", "run the stages on real processes against single-process training"),
    "train": ("zerolab.train", "train a small model with a ZeRO stage, and watch it"),
    "doctor": ("zerolab.doctor", "check what works on this machine, and how to fix the rest"),
    "grade": ("zerolab.course.classroom.grade", "run notebooks that were handed in, and check them"),
    "handout": ("zerolab.course.classroom.handout", "write the lessons without outputs and answers"),
    "progress": ("zerolab.course.classroom.progress_page", "what you have done of each lesson"),
    "bench": ("zerolab.bench.bench", "time it side by side with DDP, FSDP2 and DeepSpeed"),
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog.removeprefix('python -m ')}: {message} (--help lists all flags)\n")


def parse(argv: list[str], chosen: str | None) -> argparse.Namespace:
    """Parse the arguments. An unknown one is an error of the chosen command that names the closest flag."""
    parser, commands = build_parser(chosen)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        command = commands[args.command]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], command._option_string_actions, 1, 0.7)
        hint = f"; did you mean {near[0]}?" if near else ""
        command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return args


def build_parser(chosen: str | None) -> tuple[Parser, dict[str, Parser]]:
    """Build the parser and its commands; only the chosen command gets its arguments."""
    parser = Parser(prog="python -m zerolab", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"zerolab {zerolab.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name == chosen:
            importlib.import_module(module).add_arguments(command)
    return parser, commands.choices


def main(argv: list[str] | None = None) -> int:
    """Run one command. A bad value ends in one line on stderr and exit code 2, an interrupt with 130."""
    argv = sys.argv[1:] if argv is None else argv
    chosen = next((word for word in argv if word in COMMANDS), None)
    args = parse(argv, chosen)
    try:
        return importlib.import_module(COMMANDS[args.command][0]).run(args)
    except (ValueError, TypeError) as error:
        print(f"zerolab {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"zerolab {args.command}: interrupted, and its processes stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
