"""Where in the user's code an instruction of a compiled program comes from, and what made it.

    text of a program  --frames-->  Frames  --origin-->  "model.py:41", "jdp.all_reduce"

XLA writes, by version, source_file and source_line at each instruction, or tables of files, lines
and stack frames at the head of the program. Of a stack the innermost frame counts that is neither
of an installed library nor of jdp; frames outside the training step only called it.
"""

import re
from pathlib import PurePath
from typing import NamedTuple

from jdp.hlo import Instruction


class Frame(NamedTuple):
    """A line of source: file, line, function."""

    file: str
    line: int
    function: str


class Origin(NamedTuple):
    """Where an instruction comes from.

    Attributes:
        source: "model.py:41", the line of the user's code; "" if none is known.
        made_by: The transformation or function of jdp; "" if it was none.
    """

    source: str
    made_by: str


# Modules of jdp that ask for communication, and what users call them.
_MAKERS = {
    "reduce": "jdp.all_reduce",
    "backward": "jdp.all_reduce_in_backward",
    "hierarchy": "jdp.hierarchical",
    "fragments": "jdp.all_reduce_in_order",
    "power": "jdp.power_sgd",
    "compress": "jdp compressor",
    "feedback": "jdp compressor",
    "quantize": "jdp quantised mean",
    "local_step": "jdp local steps",
    "local": "jdp local steps",
    "zero": "jdp.zero",
    "unshard": "jdp.zero gather",
    "split": "jdp.zero",
    "drift": "jdp drift",
    "noise": "jdp noise scale",
    "check": "jdp.check_replicas",
    "finite": "jdp.skip_nonfinite",
    "precision": "jdp precision",
    "loss": "jdp.Mean",
    "microbatch": "jdp.value_and_grad",
    "grad": "jdp.value_and_grad",
    "evaluate": "jdp.eval_step",
}
_STEP = ("train.py", "train_step.<locals>.step")  # what is outside of it only called the step
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3[^/]*/|^<")
_OURS = re.compile(r"/jdp/(\w+)\.py$")


class Frames:
    """The stack frames of a program, by the number that instructions give."""

    def __init__(self, text: str) -> None:
        files = _named(text, "FileNames")
        functions = _named(text, "FunctionNames")
        places = _numbers(text, "FileLocations")
        self._stacks = _numbers(text, "StackFrames")
        # Written one higher than it is, so that 1 means none, a frame can name its own number.
        self._shift = int(any(x.get("parent_frame_id") == key for key, x in self._stacks.items()))
        self._places = {
            key: Frame(
                files.get(x.get("file_name_id", 0), ""),
                x.get("line", 0),
                functions.get(x.get("function_name_id", 0), ""),
            )
            for key, x in places.items()
        }

    def of(self, instruction: Instruction) -> list[Frame]:
        """The frames of an instruction, innermost first."""
        attributes = instruction.attributes
        if number := re.search(r"\bstack_frame_id=(\d+)", attributes):
            return self._walk(int(number.group(1)))
        file = re.search(r'source_file="([^"]*)"', attributes)
        line = re.search(r"source_line=(\d+)", attributes)
        return [Frame(file.group(1), int(line.group(1)) if line else 0, "")] if file else []

    def _walk(self, key: int) -> list[Frame]:
        found: list[Frame] = []
        while key in self._stacks and len(found) < len(self._stacks):
            place = self._places.get(self._stacks[key].get("file_location_id", 0))
            found += [place] if place else []
            key = self._stacks[key].get("parent_frame_id", 0) - self._shift
        return found


def _section(text: str, name: str) -> list[str]:
    found = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    return found.group(1).splitlines() if found else []


def _named(text: str, section: str) -> dict[int, str]:
    lines = (line.split(" ", 1) for line in _section(text, section))
    return {int(key): value.strip('"') for key, value in lines}


def _numbers(text: str, section: str) -> dict[int, dict[str, int]]:
    lines = (line.split(" ", 1) for line in _section(text, section))
    return {
        int(key): {name: int(x) for name, x in re.findall(r"(\w+)=(\d+)", value)}
        for key, value in lines
    }


def origin(frames: list[Frame]) -> Origin:
    """The user's line and what of jdp made an instruction, from its frames, innermost first."""
    makers, source = [], ""
    for frame in frames:
        name = PurePath(frame.file).name
        if ours := _OURS.search(frame.file):
            if name == _STEP[0] and frame.function in ("", _STEP[1]):
                break
            makers += [_MAKERS[ours.group(1)]] if ours.group(1) in _MAKERS else []
        elif frame.file and not _LIBRARY.search(frame.file):
            source = f"{name}:{frame.line}"
            break
    return Origin(source, makers[0] if makers else "")
